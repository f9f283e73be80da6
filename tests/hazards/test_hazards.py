"""Converted networks compute what their originals do: small forwards, and random modules."""

from __future__ import annotations

import pytest
import torch

from gpudist.transport.host import is_built, what_is_missing
from tests.hazards.entries import Grid
from tests.hazards.forwards import ENTRIES, FILES
from tests.hazards.judge import judge
from tests.hazards.random_modules import draw

RANDOM = 60
# Each forward on one grid, all kinds of small grids among them; `make hazards` tries every grid.
KINDS = 4


def _grids() -> list[tuple[str, Grid]]:
    chosen: list[tuple[str, Grid]] = []
    for number, (name, entry) in enumerate(ENTRIES.items()):
        grids = entry.all_grids()[:KINDS]
        chosen.append((name, grids[number % len(grids)]))
    return chosen


@pytest.mark.parametrize(("name", "grid"), _grids(), ids=str)
def test_forward(name: str, grid: Grid) -> None:
    entry = ENTRIES[name]
    if entry.processes and not is_built():
        pytest.skip(what_is_missing())
    verdict = judge(entry, grid, transport="host" if entry.processes else "loopback")
    assert verdict.how in entry.allowed, f"{verdict}\n{entry.make.__doc__}"


@pytest.mark.parametrize("number", range(RANDOM))
def test_random_module(number: int) -> None:
    case = draw(1, number)
    verdict = case.judge()
    # A view that had to be moved may not be changed in place.
    allowed = ("right", "refused") if case.program.changes_in_place else ("right",)
    assert verdict.how in allowed, f"{verdict}\n{case}"


def test_every_forward_says_what_people_do() -> None:
    assert len(ENTRIES) >= 150
    for name, entry in ENTRIES.items():
        assert entry.make.__doc__, name
    for file in FILES:
        assert any(entry.make.__module__ == file.__name__ for entry in ENTRIES.values())


def test_class_of_global_tensors_says_torch() -> None:
    """Libraries choose their backend by the module of a tensor's class."""
    from gpudist.sbp import GlobalTensor

    assert GlobalTensor.__module__.split(".")[0] == "torch"
    assert issubclass(GlobalTensor, torch.Tensor)
