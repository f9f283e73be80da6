"""Work beside other libraries: checks, verdicts, goals, the command and the page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import behind
from benchmarks.beside import __main__ as command, work
from benchmarks.beside.__main__ import examine, refusals
from benchmarks.beside.adapters import ours
from benchmarks.beside.page import page, read_all
from benchmarks.beside.rows import BesideRow, cells, read, summary, timed, untimed
from benchmarks.case import Case
from benchmarks.correctness.__main__ import Row as Verdict
from benchmarks.correctness.libraries import ABSENT
from benchmarks.files import BadFile, write
from benchmarks.measure import Series
from benchmarks.training import Step
from benchmarks.worlds import WorldFailed
from gpudist.transport.host.core_transport import is_built
from gpudist.world.partition import Partition
from tests import warm
from tests.pool import distributed

UNET, BLOCK, HALO, REDUCE = (
    next(case for case in work.cases(2) if case.parameters["work"] == name) for name in work.GOALS
)
SMALL = (
    replace(UNET, parameters={**UNET.parameters, "shape": (1, 1, 16, 8, 8)}),
    replace(BLOCK, parameters={**BLOCK.parameters, "shape": (2, 4, 16), "heads": 2}),
    replace(HALO, parameters={**HALO.parameters, "shape": (1, 2, 6, 3, 3)}),
    replace(REDUCE, parameters={**REDUCE.parameters, "count": 5}),
)


@distributed(ranks=[2], transports=["loopback"])
@pytest.mark.parametrize("case", SMALL, ids=work.GOALS)
def test_gpudist_is_right_and_what_differs_is_wrong(P_world: Partition, case: Case) -> None:
    side = ours.side(case, P_world)
    result = side.call()
    assert side.is_right(result)
    if isinstance(result, Step):
        assert not side.is_right(replace(result, loss=1.02 * result.loss))
        name = next(name for name, each in result.gradients.items() if each.numel())
        doubled = {**result.gradients, name: 2 * result.gradients[name]}
        assert not side.is_right(replace(result, gradients=doubled))
        side.clear()
        assert side.is_right(side.call())
    else:
        assert not side.is_right(result + torch.eye(result.shape[-1])[0])


def test_a_missing_gradient_is_wrong() -> None:
    expected = work.unet(SMALL[0]).expected
    assert work.is_whole_and_right(expected, expected)
    fewer = dict([*expected.gradients.items()][1:])
    assert not work.is_whole_and_right(replace(expected, gradients=fewer), expected)


def series(name: str, us: float, correct: bool = True) -> Series:
    return Series(name, [us] * 20, correct)


def rows() -> list[BesideRow]:
    mine = series("gpudist", 100.0)
    peaks = {"gpudist": 90.0, "fast": 50.0, "slow": 100.0, "no communication": 10.0}
    return [
        timed(UNET, mine, series("slow", 130.5), peaks),
        timed(UNET, mine, series("fast", 120.0), peaks),
        timed(UNET, mine, series("no communication", 50.0), peaks),
        timed(UNET, mine, series("late", 1.0, correct=False), peaks),
        untimed(UNET, mine, "other", "refused: conv 1", {}),
        timed(HALO, mine, series("equal", 96.0), {}),
        timed(HALO, mine, series("ahead", 90.0), {}),
    ]


def test_goals_are_of_time_and_memory() -> None:
    missed = {row.peer: row.missed for row in rows()}
    assert missed.pop("fast") == ["time", "memory"]
    assert missed.pop("ahead") == ["time"]
    assert not any(missed.values())
    without = [row.peer for row in rows() if row.goal is None]
    assert without == ["no communication", "late", "other"]
    assert summary(rows()) == "2 of 4 rows with a goal reach it."
    late = rows()[3]
    assert late.peer_us_median is None and late.peer_us is None and "wrong" in late.verdict
    assert cells(rows()[0])[3:] == (
        "100 us", "130 us", "0.77", "90 MiB", "100 MiB", "0.90", "reached",
    )  # fmt: skip
    assert [cells(row)[-1] for row in rows()][1:5] == [
        "missed: time, memory", "a bound", late.verdict, "refused: conv 1",
    ]  # fmt: skip


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "beside-2.jsonl"
    write(rows(), {"cpu": "a processor"}, path)
    assert read(path) == ({"cpu": "a processor"}, rows())
    assert read_all(tmp_path) == (rows(), [{"cpu": "a processor"}])
    path.write_text(json.dumps({"environment": {}}) + "\n" + json.dumps({"case": "x"}) + "\n")
    with pytest.raises(BadFile, match="not a row"):
        read(path)


@dataclass
class Answering:
    """World with one side, which is right, wrong, or ends its rank."""

    name: str
    is_right: bool = True
    dies: bool = False

    def prepare(self, case: Case) -> list[str]:
        return [f"side of {self.name}"]

    def check(self, name: str) -> bool:
        if self.dies:
            raise WorldFailed(f"world {self.name!r}: a rank died\nValueError: a reason")
        return self.is_right


def test_a_side_that_is_wrong_or_dies_gets_no_time() -> None:
    first: Any = Answering("ours")
    others: Any = [Answering("a"), Answering("b", is_right=False), Answering("c", dies=True)]
    right, verdicts = examine(HALO, [first, *others])
    assert right == [first, others[0]]
    assert verdicts == {"b": "silently wrong", "c": "raised: ValueError: a reason"}
    with pytest.raises(WorldFailed):
        examine(HALO, [others[2]])
    # Rows of gpudist remain, and are marked as wrong.
    assert examine(HALO, [others[1]]) == ([others[1]], {})


def test_verdicts_on_the_operators_are_reasons(tmp_path: Path) -> None:
    of = work.OPERATORS[work.UNET]

    def verdict(case: str, kind: str, layout: str = "rows") -> Verdict:
        return Verdict("DTensor", "1", None, case, layout, kind, "", None)

    found = [verdict(of[0], "refused"), verdict(of[1], "silently wrong"), verdict(of[2], "right")]
    found += [verdict(of[3], "refused", "columns"), verdict("conv 3, circular", "refused")]
    lines = [{"environment": {}}, *map(asdict, found)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "dtensor.jsonl").write_text(text)
    assert refusals(work.UNET, tmp_path) == {
        "DistConv (LBANN)": ABSENT["DistConv (LBANN)"],
        "DTensor": f"refused: {of[0]}; silently wrong: {of[1]}",
    }
    assert refusals(work.HALO, tmp_path) == {}


@pytest.mark.skipif(not is_built(), reason="the native core is not built")
def test_the_command_measures_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, *others = (
        replace(each, python=Path(warm.python())) for each in (command.OURS, *command.OTHERS)
    )
    monkeypatch.setattr(command, "OURS", ours)
    monkeypatch.setattr(command, "OTHERS", others)
    options = ["--ranks", "2", "--cases", "all-reduce, 4 KiB", "--iterations", "20"]
    assert command.main([*options, "--json", str(tmp_path)]) == 0
    assert "DTensor" in capsys.readouterr().out
    found, (environment,) = read_all(tmp_path)
    assert [row.peer for row in found] == ["torch.distributed", "DTensor"]
    assert all(row.correct and row.ratio is not None and not row.verdict for row in found)
    assert {"ours", "torch_distributed"} == set(environment["versions"])
    with pytest.raises(SystemExit):
        command.main(["--cases", "halo", "--json"])


def test_the_page_has_rows_verdicts_and_reasons() -> None:
    reason = behind.Reason("halo", "*", "a kind", "a reason")
    found = behind.Behind(("halo", 2, "4 KiB"), 1.0, {"mpi (best)": 1.2}, reason)
    made = page(rows(), [{"cpu": "a processor"}], behind.Count(3, [found], ["a case"], []))
    assert "2 of 4 rows with a goal reach it." in made
    assert "(2): refused: conv 1\n" in made and "refused: conv 1 |" not in made
    assert "| a kind | halo: 4 KiB (2) | 1.20 | a reason |" in made
    assert "in 1 of 3 frozen cases" in made and "Without a result: a case." in made
    assert "- a processor" in made
