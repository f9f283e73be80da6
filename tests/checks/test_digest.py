"""Texts that ranks compare: the same on every rank, and different for different values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from gpudist import PlanMismatch, ShapeError, halo_exchange
from gpudist.checks.digest import text_of
from gpudist.geometry import SlidingWindow
from gpudist.geometry.blocks import Blocks
from gpudist.world.partition import Partition
from tests.pool import distributed


class Reach:
    """A window of somebody else's, without a text of its own."""

    def __init__(self, cells: int) -> None:
        self.cells = cells

    def outputs(self, inputs: Blocks) -> Blocks:
        return inputs

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return start - self.cells, stop + self.cells


class Slotted:
    __slots__ = ("cells", "unset")

    def __init__(self, cells: int) -> None:
        self.cells = cells


@dataclass(frozen=True)
class Around:
    inner: Any


def test_text_of_objects_without_repr() -> None:
    for make in (Reach, Slotted, lambda n: Around(Reach(n)), lambda n: [1, (Reach(n), "a")]):
        assert text_of(make(1)) == text_of(make(1)) != text_of(make(2))
        assert "0x" not in text_of(make(1))
    assert text_of(SlidingWindow(3)) != text_of(SlidingWindow(3, padding=(1, 1)))
    assert text_of(Around(test_text_of_objects_without_repr)).endswith("objects_without_repr)")
    with pytest.raises(ShapeError, match="give the class partial a __repr__"):
        text_of((1, partial(Around, Reach(2))))


@distributed(ranks=3)
def test_window_without_repr(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([3])
    rank = P_world.rank or 0
    x = torch.full((2,), float(rank))
    y = halo_exchange(x, P_x, [Reach(1)], global_shape=(6,))
    assert y.tolist() == [max(rank - 1.0, 0.0) * (rank > 0), rank, rank, (rank + 1.0) % 3]
    with pytest.raises(PlanMismatch):
        halo_exchange(x, P_x, [Reach(2 if rank == 1 else 1)], global_shape=(6,))
