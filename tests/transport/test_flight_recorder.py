"""Debug lines, and a rank's report of its last operations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gpudist
from gpudist.errors import GpudistError, side_by_side
from gpudist.transport.debug_lines import DebugLines
from gpudist.transport.failure.channel import Failure
from gpudist.transport.loopback import LoopbackTransport
from gpudist.transport.report import report, write_report
from gpudist.world.launch import diagnostics_of
from gpudist.world.partition import Partition
from gpudist.world.runtime import world_of
from tests.pool import distributed

LINE = re.compile(
    r"gpudist: rank (\d) \d+\.\d{6} s: (\w+) (?:to|from|root) (\d), message (\d+), (\d+) bytes: "
    r"(.*)"
)


@distributed(ranks=2)
def test_one_line_a_message(P_world: Partition, tmp_path: Path) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2])
    x = torch.ones(3, 4)
    gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1)))
    P_world.barrier()
    lines = Lines()
    debug = DebugLines(P_world.wire.rank, lines)
    P_world.wire.recorder.observe(debug)
    gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1)))
    gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1)))
    P_world.wire.recorder.ignore(debug)
    found = [LINE.fullmatch(line) for line in lines.text.splitlines()]
    words = [match.groups() for match in found if match is not None]
    assert len(words) == len(found) == 4, lines.text
    rank, peer = str(P_world.rank), str(1 - P_world.wire.rank)
    for kind in ("send", "receive"):
        numbers = [int(number) for _, way, _, number, _, _ in words if way == kind]
        assert numbers[1] == numbers[0] + 1
    for mine, _, other, _, size_bytes, label in words:
        assert (mine, other, size_bytes) == (rank, peer, "12")
        assert label.startswith("halo_exchange on [1, 2] of [3, 8]")


class Lines:
    """A file in memory."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


@distributed(ranks=2, transports=("loopback", "host", "gloo"))
def test_numbers_are_those_of_errors(P_world: Partition) -> None:
    """The number of a message in a debug line is the one by which errors call it."""
    lines = Lines()
    P_world.barrier()
    P_world.wire.recorder.observe(DebugLines(P_world.wire.rank, lines))
    P_x = P_world.create_cartesian_topology_partition([2])
    cells = 4 if P_world.rank == 0 else 5
    with pytest.raises(gpudist.PlanMismatch) as caught:
        gpudist.halo_exchange(torch.ones(cells), P_x, halo=((1, 1),), global_shape=(2 * cells,))
        P_world.barrier()
    views = r"rank (\d) (?:expected from|sent to) rank \d: message (\d+) of"
    said = re.findall(views, str(caught.value))
    words = [LINE.fullmatch(line) for line in lines.text.splitlines()]
    shown = {(match[1], match[4]) for match in words if match is not None}
    assert len(said) == 2
    mine = [one for one in said if one[0] == str(P_world.rank)]
    assert mine and set(mine) <= shown


def test_the_environment_asks_for_lines_and_reports() -> None:
    assert diagnostics_of({}) == (False, "")
    assert diagnostics_of({"GPUDIST_DEBUG": "0"}) == (False, "")
    said = {"GPUDIST_DEBUG": "1", "GPUDIST_DUMP": "reports"}
    assert diagnostics_of(said) == (True, "reports")


@distributed(ranks=2, transports=("loopback",))
def test_a_world_shows_lines_if_asked(P_world: Partition) -> None:
    assert not P_world.wire.recorder.observers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUDIST_DEBUG", "1")
        for _ in range(2):
            world_of(P_world.wire)
    (only,) = P_world.wire.recorder.observers
    assert isinstance(only, DebugLines)


@distributed(ranks=2)
def test_a_report_of_the_last_operations(P_world: Partition, tmp_path: Path) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    for _ in range(3):
        gpudist.all_sum_reduce(torch.ones(3), P_x, [0])
    text = report(P_world.wire, "was asked")
    # Those of a stream of batches that an earlier test dropped may follow.
    first, own, *_ = text.split("\n  last operations over ")
    assert re.match(rf"gpudist: rank {P_world.rank} of 2, process \d+ on .*, was asked", first)
    second, *rest = own.splitlines()
    assert second == f"{P_world.transport}:"
    finished = "" if P_world.transport == "nccl" else "finished"  # there it may be on its way
    assert re.fullmatch(rf"    #\d+ all_sum_reduce over axes \[0\] .*: {finished}.*", rest[-1]), (
        text
    )
    numbers = [int(number) for number in re.findall(r"^    #(\d+) ", own, re.MULTILINE)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    write_report(str(tmp_path / "new"), P_world.wire, "was asked", "a stack")
    (written,) = (tmp_path / "new").glob(f"rank-{P_world.rank}-*.txt")
    assert "all_sum_reduce" in written.read_text() and written.read_text().endswith("a stack")


@distributed(ranks=3, transports=("loopback", "host", "gloo", "nccl"))
def test_every_rank_reports_a_failure_once(P_world: Partition, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUDIST_DUMP", str(tmp_path))
        world_of(P_world.wire)
    P_x = P_world.create_cartesian_topology_partition([3])
    gpudist.all_sum_reduce(torch.ones(3), P_x, [0])
    with pytest.raises(GpudistError):
        if P_world.rank == 1:
            P_world.wire.abort(Failure("PeerFailure", 1, "rank 1 gives up"))
        for _ in range(100):
            gpudist.all_sum_reduce(torch.ones(3), P_x, [0])
            P_world.barrier()
    (written,) = tmp_path.glob(f"rank-{P_world.rank}-*.txt")
    text = written.read_text()
    assert text.count("gpudist: rank") == 1
    assert "failed with PeerFailure: rank 1 gives up" in text
    assert "all_sum_reduce over axes [0]" in text


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = LoopbackTransport.single()
    (tmp_path / "file").touch()
    write_report(str(tmp_path / "file"), wire, "was asked")
    assert "no report in" in capsys.readouterr().err


def test_views_side_by_side() -> None:
    assert side_by_side({0: "a", 1: "b"}) == "\n  rank 0: a\n  rank 1: b"
    views = {rank: "odd" if rank == 70 else "even" for rank in range(100)}
    lines = side_by_side(views).splitlines()
    assert lines[1] == "  rank 70: odd" and lines[2] == "  rank 0: even"
    assert len(lines) == 18 and lines[-1] == "  84 more ranks: even"
