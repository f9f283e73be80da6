"""Functions without a rule: gathered with a warning, refused above a limit, or refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gpudist import ConversionError, distribute
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed

SHAPE = (2, 3, 7, 6)


class Head(nn.Module):
    """Counts values, by a function that has no rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x.detach(), 4, -1, 1)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.head = Head()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.conv(x)
        return y, self.head(y), self.head(y * 2)


def converted(P_world: Partition, **options: Any) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(1)
    alone = Counting().double()
    return (
        alone,
        distribute(copy.deepcopy(alone), grid(P_world, [1, 1, 2, 1]), **options),
        random_like_all(SHAPE, 1),
    )


@distributed(ranks=2, transports=["host", "gloo"])
def test_gathered_with_one_warning_a_place(P_world: Partition) -> None:
    alone, net, x = converted(P_world)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            found = net(own_block(x, net.P_x, requires_grad=False))
    for y, expected in zip(found, alone(x), strict=True):
        assert_equal_to(y.full_tensor().detach(), expected.detach(), 1e-12, "output")
    told = [w for w in caught if "gathered" in str(w.message)]
    if P_world.rank:
        assert not told
        return
    (one,) = told
    assert one.filename == __file__
    # All cells are held, and half of them go each way.
    cells = 2 * 3 * 7 * 6 * 8
    line = Head.forward.__code__.co_firstlineno + 1
    assert str(one.message) == (
        f"head ({__file__}, line {line}): torch.histc: it has no rule for blocks; {cells} "
        f"bytes of inputs are gathered by moving {cells} bytes between 2 workers, and each worker "
        "computes the whole result"
    )


@distributed(ranks=2, transports=["loopback"])
def test_refused(P_world: Partition) -> None:
    _, net, x = converted(P_world, unknown="refuse")
    with pytest.raises(ConversionError, match=r"head \(.*, line \d+\): torch.histc: .*'refuse'"):
        net(own_block(x, net.P_x, requires_grad=False))


@distributed(ranks=2, transports=["loopback"])
def test_not_gathered_above_the_limit(P_world: Partition) -> None:
    cells = 2 * 3 * 7 * 6 * 8
    _, net, x = converted(P_world, gather_limit_bytes=cells - 1)
    block = own_block(x, net.P_x, requires_grad=False)
    with pytest.raises(ConversionError, match=rf"pass gather_limit_bytes={cells} to allow it"):
        net(block)
    alone, net, x = converted(P_world, gather_limit_bytes=cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, counts, _ = net(block)
    assert_equal_to(counts.full_tensor(), alone(x)[1], 0.0, "counts")


class Bits(nn.Module):
    """Views floats as integers, which the entry of ``view`` does not support."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int64).remainder(7)


@distributed(ranks=2, transports=["host"])
def test_a_function_with_an_entry_is_gathered_at_every_call_that_it_does_not_support(
    P_world: Partition,
) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    network = distribute(Bits(), P_x, inputs={"x": "block"})
    for seed in range(3):
        whole = random_like_all(SHAPE, seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = network(own_block(whole, P_x)).full_tensor()
        assert torch.equal(found, Bits()(whole))
        assert len(caught) == (seed == 0 and P_world.rank == 0)
