"""Arrangements of a block's cells, against torch's indexing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch.autograd import forward_ad

from gpudist import stats
from gpudist.exchange.arrangement import Arrangement, bind_arrangement
from gpudist.world.partition import Partition
from tests.ops.dense import random
from tests.pool import distributed

SHAPE = (2, 3, 20)
# Reflected and repeated cells, cells in no order, and a dim without a copy.
CELLS: dict[int, list[int]] = {
    1: [1, 0, 1, 2, 2, 2],
    2: [*range(3, 20), *range(19, 0, -1), *range(19, 0, -1)],
}


def arranged(P: Partition, dtype: torch.dtype, shape: Sequence[int] = SHAPE) -> Arrangement:
    arrange = bind_arrangement(CELLS, shape, P, "test", dtype)
    assert arrange is not None
    return arrange


def by_torch(x: torch.Tensor, cells: Mapping[int, Sequence[int]] = CELLS) -> torch.Tensor:
    for dim, order in cells.items():
        x = x.index_select(dim, torch.tensor(order))
    return x


@distributed(ranks=2)
def test_every_rank_for_itself(P_world: Partition) -> None:
    if P_world.rank == 1:
        before = stats().total.calls
        x = random(SHAPE).requires_grad_()
        y, expected = arranged(P_world, x.dtype)(x), by_torch(x)
        torch.testing.assert_close(y, expected)
        (found,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (wanted,) = torch.autograd.grad(expected.pow(3).sum(), x, create_graph=True)
        torch.testing.assert_close(found, wanted)
        again = [torch.autograd.grad(g.pow(2).sum(), x)[0] for g in (found, wanted)]
        torch.testing.assert_close(*again)
        assert stats().total.calls == before


@distributed(ranks=1, transports=["host"])
def test_transforms_and_graphs(P_world: Partition) -> None:
    x, t = random(SHAPE, 1), random(SHAPE, 2)
    arrange = arranged(P_world, x.dtype)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(arrange(forward_ad.make_dual(x, t))).tangent
    torch.testing.assert_close(tangent, by_torch(t))
    found = torch.func.grad(lambda x: arrange(x).pow(3).sum())(x)
    wanted = torch.func.grad(lambda x: by_torch(x).pow(3).sum())(x)
    torch.testing.assert_close(found, wanted)
    torch.compiler.reset()
    y = torch.compile(arrange, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, by_torch(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.bool])
@distributed(ranks=1, transports=["host", "gloo"])
def test_dtypes(P_world: Partition, dtype: torch.dtype) -> None:
    x = random(SHAPE).to(dtype)
    assert torch.equal(arranged(P_world, dtype)(x), by_torch(x))
    empty = x[:0]
    assert torch.equal(arranged(P_world, dtype, empty.shape)(empty), by_torch(empty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@distributed(ranks=1, transports=["host", "gloo"])
def test_many_16_bit_gradients_are_rounded_once(P_world: Partition, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 4, dtype=dtype, requires_grad=True)
    cells = {2: [0] * 200 + [0, 1, 2, 3]}
    arrange = bind_arrangement(cells, x.shape, P_world, "test", dtype)
    assert arrange is not None
    gradient = torch.full((1, 1, 204), 1.0078125, dtype=dtype)
    (found,) = torch.autograd.grad(arrange(x), x, gradient)
    assert found[0, 0, 0] == torch.tensor(201 * 1.0078125).to(dtype)


@distributed(ranks=1, transports=["host"])
def test_cells_as_they_are_need_nothing(P_world: Partition) -> None:
    assert bind_arrangement({1: range(3)}, SHAPE, P_world, "test", torch.float32) is None
