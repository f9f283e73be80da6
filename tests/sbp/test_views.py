"""Views of global tensors that are copies: they follow their base when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gpudist
from gpudist.geometry.layout import split
from gpudist.sbp.placement import Placement
from gpudist.world.partition import Partition
from tests.convert.training import assert_as_alone
from tests.nn.compare import grid, random_like_all
from tests.pool import distributed
from tests.sbp.test_spectra import sent_bytes


class Scaled(nn.Module):
    """Calls a function on its input times a weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def rows_of(y: torch.Tensor) -> torch.Tensor:
    """Return a view that joins the last dim, which is split, with the one before."""
    return y.reshape(len(y), -1)


@distributed(ranks=[2, 3], transports=["loopback"])
def test_one_rank_keeps_a_view(P_world: Partition) -> None:
    """A rank sends the same, whatever it has not freed yet."""
    kept: list[torch.Tensor] = []

    def write(y: torch.Tensor) -> torch.Tensor:
        rows = rows_of(y)
        if P_world.rank == 1:
            kept.append(rows)
        del rows
        return y.mul_(2)

    assert_as_alone(
        lambda: Scaled(write), grid(P_world, [1, 1, P_world.size]), [(2, 3, 6)], steps=1
    )


@distributed(ranks=[2], transports=["loopback"])
def test_gradients_of_an_outdated_view(P_world: Partition) -> None:
    """A view keeps its gradient if its base changes, or the view is used, without gradients."""

    def write(y: torch.Tensor) -> torch.Tensor:
        rows = rows_of(y)
        with torch.no_grad():
            y.mul_(2)
        total = rows.sum()
        y.mul_(3)
        with torch.no_grad():
            rows.sum()
        return rows.mean() + total + y

    assert_as_alone(lambda: Scaled(write), grid(P_world, [1, 1, 2]), [(2, 3, 4)], steps=1)


@distributed(ranks=[2], transports=["loopback"])
def test_what_an_outdated_view_sends(P_world: Partition) -> None:
    """A change of the base moves nothing; neither does a question that one rank alone asks."""
    x: Any = gpudist.to_global(
        random_like_all((2, 3, 2), 1).requires_grad_(),
        Placement.of(grid(P_world, [P_world.size])),
        split(2),
    )
    y: Any = x * 2
    rows: Any = rows_of(y)

    def change() -> None:
        for _ in range(3):
            y.add_(1)
        if P_world.rank == 1:
            assert "not computed yet" in f"{rows!r}" and rows.requires_grad

    assert sent_bytes(P_world, change) == 0
    assert sent_bytes(P_world, lambda: rows.sin()) > 0
    assert sent_bytes(P_world, lambda: rows.cos()) == 0
    assert torch.equal(rows.full_tensor(), y.full_tensor().reshape(2, -1))
