"""The example of batches of any length, as a user starts it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def test_runs_under_torchrun() -> None:
    done = subprocess.run(
        [warm.python(), *LAUNCH, "4", "examples/variable_batches.py", "--steps", "20"],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[6, 4] tokens arrive as [4, 6]: other documents" in done.stdout
    assert "[4, 5] tokens do not arrive: ranks disagree about the operation" in done.stdout
    assert "on 4 ranks: 20 batches of as many shapes" in done.stdout
