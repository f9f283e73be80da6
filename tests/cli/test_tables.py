"""Tables and texts fit the terminal, or 80 characters, and no number is cut."""

from __future__ import annotations

import io
import re
import sys
from math import prod

import pytest

from gpudist.cli import check, main, plan
from gpudist.cli.commands import COMMANDS
from gpudist.cli.self_check import LinkSpeed, Report, Result
from gpudist.cli.tables import print_columns
from gpudist.planning.advice import Advice
from gpudist.planning.clock import Phase
from gpudist.planning.grids import Grid
from gpudist.planning.rehearsal import Memory, Rehearsal
from tests.cli.test_env import Terminal

WIDTH = 80


KINDS = pytest.mark.parametrize("kind", ["file", "terminal", "terminal without rich"])


def output(kind: str, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Replace standard output by a file or a terminal."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    if kind == "terminal":
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    shown = io.StringIO() if kind == "file" else Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    return shown


def lines_of(shown: io.StringIO) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()


def advice(grid: Grid) -> Advice:
    """Advice with the longest numbers that are likely."""
    phase = Phase(
        messages=123456, message_bytes=1023 * 2**30, collectives=1234, compute_s=0.123,
        message_s=1.0,
    )  # fmt: skip
    memory = Memory(1023 * 2**20, 1023 * 2**20, 1023 * 2**30)
    return Advice(grid, one := Rehearsal(0, phase, phase, memory), (one,), False, 2**40, 1.0, False)


@KINDS
@pytest.mark.parametrize("grid", [(1, 1, 64, 64, 1), (16, 1, 16, 128, 1024)])
def test_plan(kind: str, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "plan", lambda *_, **__: [advice(grid)])
    shown = output(kind, monkeypatch)
    assert main(["plan", "torch.nn:ReLU", "--shape", "1", "--ranks", "1"]) == 0
    lines = lines_of(shown)
    tables = [line for line in lines if line.startswith(("grid", str(list(grid))))]
    assert max(map(len, tables)) <= WIDTH
    printed = set(re.split(r"  +|\n", "\n".join(tables)))
    assert {"step", "no overlap", "collectives", "all messages", "imbalance"} <= printed
    whole = 246912 * prod(grid)
    numbers = {"2.25 s", "246912", "2046.0 GiB", "2468", f"<= {whole}", "1.00", "1023.0 MiB"}
    assert numbers <= printed
    assert shown.isatty() <= (max(map(len, lines)) <= WIDTH)


@KINDS
def test_check(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Result("halo_exchange, dim after dim", True, 1e-16, 1e8, 1234.56, 0.01)
    link = LinkSpeed(4094, 4095, True, 1234.56)
    told = ("Do this. " * 20).strip()
    report = Report(4096, "loopback", "cuda:0", 10.0, (slow,), (link,), ("NV18",), (told,))
    monkeypatch.setattr(check, "run_distributed", lambda *_, **__: [report])
    shown = output(kind, monkeypatch)
    assert main(["check"]) == 0
    lines = lines_of(shown)
    table = [line for line in lines if line.startswith(("operator", "halo", "ranks", "4094"))]
    assert max(map(len, table)) <= WIDTH
    assert "100000000  1234.56    1% slow" in table[2]
    assert shown.isatty() <= (max(map(len, lines)) <= WIDTH)
    assert "  torchrun --standalone --nproc-per-node 4 -m gpudist check" in lines


@KINDS
def test_many_columns_are_further_tables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number} has a long name" for number in range(9)]
    shown = output(kind, monkeypatch)
    print_columns(("first", *names), [("row", *(str(10**number) for number in range(9)))])
    lines = lines_of(shown)
    assert max(map(len, lines)) <= WIDTH
    assert [line.split()[0] for line in lines if line] == ["first", "row"] * 3
    numbers = " ".join(line for line in lines if line.startswith("row"))
    assert re.findall(r"\d+", numbers) == [str(10**number) for number in range(9)]


@pytest.mark.parametrize("arguments", [[], *([command.name] for command in COMMANDS)])
def test_help(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--help"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= WIDTH
    assert printed.startswith(" ".join(["usage: gpudist", *arguments]))
    assert not arguments or "--json" in printed
