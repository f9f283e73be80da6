"""Views of global tensors that are copies: they follow their base when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.geometry.layout import broadcast, split
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


@distributed(ranks=[2], transports=["loopback"])
def test_strides_are_of_the_whole(P_world: Partition) -> None:
    whole = random_like_all((4, 2, 6), 1)
    placement = Placement.of(grid(P_world, [P_world.size]))
    x: Any = gpudist.to_global(whole, placement, broadcast).to_global(sbp=split(2))
    for function in (
        lambda x: x.transpose(0, 2),
        lambda x: x.permute(2, 0, 1) + 1,
        lambda x: x.permute(2, 0, 1).sum(1),
        lambda x: x[:, :, 1:4],
        lambda x: x[None].contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 2).reshape(12, 4),
        lambda x: x.permute(2, 0, 1).detach().clone(),
    ):
        y, expected = function(x), function(whole)
        assert y.stride() == expected.stride()
        assert y.is_contiguous() == expected.is_contiguous()


@distributed(ranks=[2], transports=["loopback"])
def test_parts_that_are_copied(P_world: Partition) -> None:
    """A view whose part torch copies, because the part has gaps, is written to its base."""
    part = random_like_all((3, 4, 4), 1)[..., :2]
    x: Any = gpudist.to_global(part.clone(), Placement.of(grid(P_world, [2])), split(0))
    x = x.like(part)
    doubled = 2 * x.full_tensor()
    for view in (x.flatten(), x.view(6, 8), x.contiguous()):
        view.mul_(2)
        assert torch.equal(x.full_tensor(), doubled)
        assert torch.equal(view.full_tensor(), doubled.view(view.shape))
        x.div_(2)
        assert torch.equal(2 * view.full_tensor(), doubled.view(view.shape))


@pytest.mark.filterwarnings("ignore:.*are gathered by moving")
@distributed(ranks=[2], transports=["loopback"])
def test_functions_in_place_without_a_rule(P_world: Partition) -> None:
    def write(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y.detach().apply_(lambda cell: cell + 1)
        return y * 1

    net = Scaled(write).double()
    x = random_like_all((2, 3, 4), 1)
    P_x = grid(P_world, [1, 1, 2])
    expected = net(x)
    found: Any = gpudist.distribute(net, P_x)(gpudist.scatter(x, P_x))
    assert torch.equal(found.full_tensor(), expected)
