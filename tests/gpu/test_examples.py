"""Examples on a GPU train as the sequential network does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.devices import require_gpu

require_gpu()

EXAMPLES = Path(__file__).parents[2] / "examples"
_SMALL = ("--data", "phases", "--size", "32", "--width", "4", "--steps", "6", "--dtype", "float64")


@pytest.mark.parametrize("captured", [(), ("--capture",)], ids=["eager", "captured"])
def test_unet(captured: tuple[str, ...]) -> None:
    words = run("unet3d.py", *_SMALL, *captured, "--compare")
    assert "1 workers against one, after 6 steps" in words


def test_training_resumes_with_equal_bits(tmp_path: Path) -> None:
    whole = run("resume.py", "--folder", str(tmp_path / "whole"), "--steps", "6")
    run("resume.py", "--folder", str(tmp_path / "parts"), "--steps", "4")
    parts = run("resume.py", "--folder", str(tmp_path / "parts"), "--steps", "6")
    assert whole.splitlines()[-1] == parts.splitlines()[-1]


def run(example: str, *options: str) -> str:
    """Return what an example prints on one rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [sys.executable, *launcher, str(EXAMPLES / example), *options]
    variables = {**os.environ, "GPUDIST_TRANSPORT": "nccl", "PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout
