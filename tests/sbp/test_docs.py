"""docs/global_tensors.md: its program runs as it stands there, and its numbers are those of now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gpudist import runtime
from gpudist.partition import Partition
from tests.pool import distributed
from tests.sbp.boxing_table import table
from tests.sbp.test_dtensor import torch_world

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "global_tensors.md").read_text()


def test_the_boxings_are_those_of_now() -> None:
    assert table() in TEXT


@distributed(ranks=4, transports=("gloo",), timeout_s=240.0)
def test_the_program_runs(P_world: Partition, tmp_path: Path) -> None:
    """In the pool's world in place of one of its own."""
    program = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
    assert program.count("assert ") == 11 and "P_world = gpudist.init()" in program
    program = program.replace("gpudist.init()", "runtime.init()")
    names: dict[str, Any] = {"runtime": runtime}
    with torch_world(P_world, tmp_path), patch.object(runtime, "init", lambda: P_world):
        exec(compile(program, "global_tensors.md", "exec"), names)
    assert names["w"].grad is not None and torch.isfinite(names["loss"].to_local())
