"""The commands in docs/profiling.md and docs/debugging.md run and print what the pages show."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import gpudist
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests import warm
from tests.pool import distributed

ROOT = Path(__file__).resolve().parents[2]
DEBUGGING = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")


def blocks_of(name: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def in_columns(table: str) -> list[list[str]]:
    """Return the cells of the table without the seconds."""
    return [re.split(r"  +", line)[:-1] for line in table.splitlines()]


@distributed(ranks=2, transports=("host", "gloo"))
def test_the_blocks_of_profiling(P_world: Partition, tmp_path: Path) -> None:
    program = "".join(blocks_of("profiling.md"))
    program = program.replace("gpudist.init()", "gpudist.world.runtime.world()")
    program = program.replace('"trace.json"', repr(str(tmp_path / "trace.json")))
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime._runtime, "P_world", P_world)
        exec(program, names)
    if P_world.rank == 0:
        text = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
        shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
        assert shown is not None and in_columns(shown[1]) == in_columns(str(names["mine"]))
    P_world.barrier()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_hang_of_debugging(tmp_path: Path) -> None:
    """The error and report have the documented form: names, numbers, states."""
    hangs, in_a_notebook = blocks_of("debugging.md")
    # The ranks start beside other tests: more patience than the page has.
    patient = hangs.replace("timeout=3.0", "timeout=6.0")
    assert patient != hangs
    (tmp_path / "hangs.py").write_text(patient)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "hangs.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.update(GPUDIST_DUMP="reports", GPUDIST_DEBUG="1", GPUDIST_TRANSPORT="host")
    ended = subprocess.run(
        [warm.python(), *command], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode != 0
    shown = re.search(r"hangs\.py\n(gpudist\.errors.*?)```", DEBUGGING, re.DOTALL)
    assert shown is not None
    for line in shown[1].splitlines():
        pattern = re.escape(line).replace("4711", r"\d+").replace("node,", r"\S+,")
        pattern = pattern.replace(re.escape("3.0 s"), r"\d+\.\d s")
        pattern = pattern.replace(re.escape("after 3 s"), "after 6 s")
        assert re.search(pattern, ended.stderr), f"{line}\nis not in\n{ended.stderr}"
    for line in re.findall(r"^gpudist: rank 0 0\.\d+ s: (.*)$", DEBUGGING, re.MULTILINE):
        pattern = re.sub(r"message \d+", r"message \\d+", re.escape(line).replace(r"\ ", " "))
        assert re.search(pattern, ended.stderr), f"{line}\nis not in\n{ended.stderr}"
    (report,) = (tmp_path / "reports").glob("rank-0-*.txt")
    assert "failed with CollectiveTimeout" in report.read_text()
    exec(in_a_notebook, {"gpudist": gpudist})


@distributed(ranks=2, transports=("host",))
def test_the_disagreement_of_debugging(P_world: Partition) -> None:
    import torch

    P_x = P_world.create_cartesian_topology_partition([1, 2])
    with pytest.raises(gpudist.PlanMismatch) as caught:
        if P_world.rank == 0:
            gpudist.halo_exchange(
                torch.ones(4, 8), P_x, halo=((0, 0), (1, 1)), global_shape=(4, 16)
            )
        else:
            gpudist.all_sum_reduce(torch.ones(4, 8), P_x, [1], global_shape=(4, 8))
        P_world.barrier()
    words = str(caught.value).splitlines()
    shown = DEBUGGING[DEBUGGING.index("ranks disagree about") :].splitlines()[:4]
    assert len(words) == 4
    assert words[0] == shown[0] and words[3] == shown[3]
    view = r"  rank \d (expected from|sent to) rank \d: message \d+ of \d+ bytes for '\w+ "
    for line in (*words[1:3], *shown[1:3]):
        assert re.match(view, line), line
