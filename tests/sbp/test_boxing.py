"""Every ordered pair of attributes: values, adjoint, and the adjoint's adjoint."""

from __future__ import annotations

import random as python_random
from itertools import product

import pytest
import torch

from gpudist.errors import ShapeError
from gpudist.geometry.layout import Layout, NdSbp
from gpudist.sbp.boxing import box, box_both_ways
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.parts import B, P, S, assert_parts, part_of, random

Ranks = tuple[int, ...]


def all_sbps(axes: int, dims: int) -> list[NdSbp]:
    return list(product((*map(S, range(dims)), B, P), repeat=axes))


def check(source: Layout, target: Layout, P_world: Partition) -> None:
    what = f"{source.ranks} {source.sbp} -> {target.ranks} {target.sbp} of {source.shape}"
    assert P_world.rank is not None
    x = random(source.shape)
    part = part_of(x, source, P_world.rank).requires_grad_()
    before = part.detach().clone()
    y = box(part, source, target, P_world)
    expected = target.boxes[P_world.rank].shape if P_world.rank in target.ranks else (0,)
    assert tuple(y.shape) == expected, what
    assert_parts(y, x, target, P_world, what)
    assert torch.equal(part, before), what
    if source.boxes and 0 not in source.shape:
        assert_adjoint(lambda t: box(t, source, target, P_world), part, P_world)
    # The adjoint of the adjoint of a linear map is the map.
    v = torch.randn_like(y).requires_grad_()
    (back,) = torch.autograd.grad(y, part, v, create_graph=True)
    (again,) = torch.autograd.grad(back, v, part.detach())
    torch.testing.assert_close(again, y.detach(), rtol=0, atol=1e-14)


GRIDS: list[tuple[Ranks, Ranks, Ranks, Ranks, tuple[int, ...]]] = [
    ((0, 1, 2), (3,), (0, 1, 2), (3,), (5, 4)),
    ((0, 1, 2, 3), (2, 2), (0, 1, 2, 3), (2, 2), (7, 3)),
    ((0, 1), (2,), (2, 3), (2,), (3, 5)),
    ((0, 1, 2), (3,), (3, 1), (2,), (5, 2)),
    ((0, 1, 2, 3), (2, 2), (2, 0, 1), (3,), (5, 4)),
    ((1,), (1,), (3, 2, 1, 0), (2, 2), (3, 3)),
    ((0, 1, 2, 3), (4,), (0, 1, 2, 3), (2, 2), (2, 3)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", GRIDS, ids=str)
@distributed(ranks=4, transports=("loopback",))
def test_every_pair(P_world: Partition, case: tuple[tuple[int, ...], ...]) -> None:
    ranks_x, grid_x, ranks_y, grid_y, shape = case
    pairs = product(all_sbps(len(grid_x), len(shape)), all_sbps(len(grid_y), len(shape)))
    for a, b in pairs:
        check(Layout(ranks_x, grid_x, a, shape), Layout(ranks_y, grid_y, b, shape), P_world)


@distributed(ranks=8, transports=("loopback",))
def test_three_axes(P_world: Partition) -> None:
    """A sample of the 15625 pairs on 2 x 2 x 2, of a tensor with three uneven dims."""
    chosen = python_random.Random(0)
    sbps = all_sbps(3, 3)
    ranks = tuple(range(8))
    for _ in range(25):
        a, b = chosen.choice(sbps), chosen.choice(sbps)
        source = Layout(ranks, (2, 2, 2), a, (5, 3, 2))
        check(source, Layout(ranks[::-1], (2, 2, 2), b, (5, 3, 2)), P_world)


@distributed(ranks=4, transports=("loopback",))
def test_explicit_cuts(P_world: Partition) -> None:
    """Blocks of any size, some empty, are boxed in both directions and between placements."""
    ranks, grid, shape = (0, 1, 2, 3), (2, 2), (5, 3)
    ends: list[NdSbp] = [
        (S(0, [1, 4]), B), (S(0, [0, 5]), S(1, [0, 3])), (S(0, [3, 2]), S(0)), (P, S(0, [5, 0])),
        (S(0, [1, 4]), S(0)), (S(1), S(0, [2, 3])), (B, S(1)), (B, P), (S(0), P),
    ]  # fmt: skip
    for a, b in product(ends, repeat=2):
        check(Layout(ranks, grid, a, shape), Layout(ranks, grid, b, shape), P_world)
    line = Layout((3, 0, 1), (3,), (S(0, [0, 4, 1]),), shape)
    for a in ends:
        check(Layout(ranks, grid, a, shape), line, P_world)
        check(line, Layout(ranks, grid, a, shape), P_world)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3)], ids=str)
@distributed(ranks=3, transports=("loopback",))
def test_few_cells(P_world: Partition, shape: tuple[int, ...]) -> None:
    ranks = (0, 1, 2)
    for a, b in product(all_sbps(1, len(shape)), repeat=2):
        check(Layout(ranks, (3,), a, shape), Layout(ranks, (3,), b, shape), P_world)


@distributed(ranks=4, transports=("host", "gloo"))
def test_between_processes(P_world: Partition) -> None:
    ranks = (0, 1, 2, 3)
    for a, b in [((P, B), (B, S(0))), ((S(0), P), (B, S(0))), ((B, S(1)), (P, S(0)))]:
        source = Layout(ranks, (2, 2), a, (7, 3))
        check(source, Layout(ranks, (2, 2), b, (7, 3)), P_world)
    check(Layout((0, 1), (2,), (P,), (7,)), Layout((2, 3), (2,), (B,), (7,)), P_world)


@distributed(ranks=2, transports=("loopback",))
def test_equal_layouts_are_no_movement(P_world: Partition) -> None:
    layout = Layout((0, 1), (2,), (S(0),), (3,))
    x = part_of(random((3,)), layout, P_world.rank or 0)
    assert box(x, layout, layout, P_world) is x


@distributed(ranks=2, transports=("loopback",))
def test_truth_values_have_no_sum(P_world: Partition) -> None:
    terms, copies = (Layout((0, 1), (2,), (one,), (3,)) for one in (P, B))
    with pytest.raises(ShapeError, match="has no sum"):
        box(torch.ones(3, dtype=torch.bool), terms, copies, P_world)


@distributed(ranks=2, transports=("loopback",))
def test_declared_gradient(P_world: Partition) -> None:
    """The gradient is boxed as declared, instead of by the adjoint."""
    copies, terms = (Layout((0, 1), (2,), (one,), (3,)) for one in (B, P))
    x = torch.arange(3.0).requires_grad_()
    y = box_both_ways(x, [copies], [terms, copies], P_world)
    assert torch.equal(y, x)
    y.backward(torch.full((3,), float(P_world.rank or 0) + 1))
    assert torch.equal(x.grad, torch.full((3,), 3.0)) if x.grad is not None else False


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@distributed(ranks=2, transports=("loopback",))
def test_dtypes_that_no_transport_carries(P_world: Partition) -> None:
    source, target = (Layout((0, 1), (2,), (sbp,), (4,)) for sbp in (S(0), B))
    for dtype in (torch.complex32, torch.uint16, torch.float8_e4m3fn):
        with pytest.raises(ShapeError, match=rf"dtype {dtype} cannot be moved, only float32"):
            box(torch.zeros(2).to(dtype), source, target, P_world)
    P_world.barrier()
