"""The example of a network that is too big for one worker, started as by a user."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import warm

pytest.importorskip("rich", reason="the example prints with rich: pip install 'gpudist[examples]'")

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def too_big(*arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "80"}
    return subprocess.run(
        [warm.python(), *LAUNCH, "examples/too_big.py", *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_one_worker_is_out_of_memory_and_four_are_not() -> None:
    limit_mb = 230
    done = too_big("--size", 64, "--steps", 1, "--limit-mb", limit_mb, "--compare")
    assert done.returncode == 0, done.stderr
    assert re.search("one worker: .*(can't allocate memory|could not create)", done.stderr)
    *used, unlimited = [int(mb) for mb in re.findall(r"(\d+) MB +│ 0\.", done.stdout)]
    assert len(used) == 4 and max(used) <= limit_mb < unlimited
    assert "largest relative difference of a loss" in done.stdout


def test_a_network_that_fits_one_worker_shows_nothing() -> None:
    done = too_big("--size", 8, "--steps", 1, "--limit-mb", 2000)
    assert done.returncode != 0
    assert "2000 MB are enough for one worker; lower --limit-mb" in done.stderr
