"""The example of 2-D SBP, started as by a user, asserts the results of OneFlow's page."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def test_under_torchrun() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [warm.python(), *LAUNCH, str(ROOT / "examples" / "sbp_2d.py")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shapes = "global_x: torch.Size([2, 2, 8]), pred: torch.Size([2, 2, 2]) (broadcast, split(0))"
    for rank in range(4):
        assert f"rank: {rank}, local_x:" in done.stdout
        assert f"rank: {rank}, {shapes}" in done.stdout
    assert "(broadcast, split(0)) x (split(1), broadcast) = (split(1), split(0))\n" in done.stdout
    assert re.search(r"= \(split\(1\), split\(0\), partial_sum\)", done.stdout)
