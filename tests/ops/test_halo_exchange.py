"""Halo exchange: the cells a kernel reads, and gradients added where they were copied from."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

from gpudist import HaloWidths, SlidingWindow, halo_exchange, nn
from gpudist.errors import PartitionError, PlanMismatch, ShapeError
from gpudist.geometry import halo_choice
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.ops.dense import (
    Tensors,
    assembled,
    assert_matches_dense,
    assert_same,
    blocks,
    cells,
    local_input,
    operations,
    partition_of,
    random,
)
from tests.pool import distributed

Widths = tuple[tuple[int, int], ...]


class Stencil(NamedTuple):
    """Widths beside every balanced block of a tensor."""

    extents: tuple[int, ...]
    grid: tuple[int, ...]
    halo: Widths
    periodic: tuple[bool, ...]


CASES = {
    "one dim": Stencil((11,), (4,), ((1, 1),), (False,)),
    "asymmetric": Stencil((2, 11), (1, 4), ((0, 3),), (False,)),
    "wider than a neighbour": Stencil((6,), (4,), ((4, 3),), (False,)),
    "empty blocks": Stencil((2,), (4,), ((1, 2),), (False,)),
    "negative": Stencil((12, 2), (4, 1), ((-1, 2), (0, -1)), (False, False)),
    "nothing left": Stencil((4,), (4,), ((-1, 0),), (False,)),
    "corners": Stencil((5, 7), (2, 2), ((1, 2), (2, 1)), (False, False)),
    "both sides the same rank": Stencil((5, 4), (2, 2), ((1, 1), (2, 1)), (True, True)),
    "wraps to itself": Stencil((3, 5), (1, 4), ((2, 1), (0, 0)), (True, False)),
    "wraps more than once": Stencil((3,), (2,), ((4, 7),), (True,)),
    "one periodic axis": Stencil((5, 7), (2, 2), ((1, 1), (1, 1)), (False, True)),
    "one inactive": Stencil((2, 8), (1, 3), ((2, 1),), (True,)),
    "three dims": Stencil((3, 5, 4), (1, 2, 2), ((1, 1), (1, 1), (1, 1)), (True, False, True)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
WINDOWS = {
    "kernel 5, padded": (11, SlidingWindow(5, padding=(2, 2))),
    "kernel 5": (11, SlidingWindow(5)),
    "kernel 2, stride 2": (10, SlidingWindow(2, 2)),
    "stride drops cells": (20, SlidingWindow(2, 2)),
    "stride beyond the kernel": (13, SlidingWindow(1, 3)),
    "dilation": (12, SlidingWindow(3, dilation=2, padding=(2, 2))),
    "all at once": (17, SlidingWindow(3, 2, 3, (4, 1))),
    "fewer outputs than workers": (7, SlidingWindow(5, 2)),
    "reads padding only": (2, SlidingWindow(2, 2, padding=(2, 2))),
}


def balanced(extent: int, parts: int) -> list[tuple[int, int]]:
    stops = np.cumsum([0] + [len(part) for part in np.array_split(np.arange(extent), parts)])
    return list(pairwise(map(int, stops)))


def cut(
    x: torch.Tensor, ranges: Sequence[tuple[int, int]], periodic: Sequence[bool], fill: float = 0.0
) -> torch.Tensor:
    """Return the cells of ``x`` at ``ranges``, wrapped or ``fill`` beyond its edges."""
    inside = torch.ones((), dtype=torch.bool)
    for dim, ((start, stop), wraps) in enumerate(zip(ranges, periodic, strict=True)):
        index, extent = torch.arange(start, stop), x.shape[dim]
        there = (index >= 0) & (index < extent) | torch.tensor(wraps)
        index = index % extent if wraps else index.clamp(0, extent - 1)
        x = x.index_select(dim, index)
        inside = inside & there.reshape([-1 if d == dim else 1 for d in range(len(ranges))])
    return torch.where(inside, x, torch.tensor(fill, dtype=x.dtype))


def dense_halo(case: Stencil, xs: Tensors, fill: float = 0.0) -> Tensors:
    size = int(np.prod(case.grid))
    x = assembled(xs[:size], case.grid)
    leading = len(case.grid) - len(case.halo)
    halo = ((0, 0),) * leading + case.halo
    periodic = (False,) * leading + case.periodic
    outputs = [x.clone() for x in xs]
    for rank, index in enumerate(np.ndindex(*case.grid)):
        ranges = []
        for extent, parts, i, (left, right) in zip(x.shape, case.grid, index, halo, strict=True):
            start, stop = balanced(extent, parts)[i]
            # A worker without cells needs none.
            wide = start < stop
            ranges.append((start - left, max(start - left, stop + right if wide else start - left)))
        outputs[rank] = cut(x, ranges, periodic, fill)
    return outputs


def inputs_on(case: Stencil, x: torch.Tensor, size: int) -> Tensors:
    parts = blocks(x, case.grid)
    return parts + [x.new_empty(2, 0)] * (size - len(parts))


@pytest.mark.parametrize("nested", [False, True], ids=["one stage", "nested"])
@every_case
@distributed(ranks=4)
def test_cells_and_derivatives(P_world: Partition, case: Stencil, nested: bool) -> None:
    P_x = partition_of(P_world, range(int(np.prod(case.grid))), case.grid)
    layer = nn.HaloExchange(P_x, halo=case.halo, periodic=case.periodic, nested=nested)
    numbered = inputs_on(case, cells(case.extents), 4)
    x = numbered[P_world.rank]
    before = x.clone()
    y = layer(x)
    assert_same(y, dense_halo(case, numbered)[P_world.rank])
    assert_same(x, before)
    assert y.numel() == 0 or y.data_ptr() != x.data_ptr()
    inputs = inputs_on(case, random(case.extents), 4)
    assert_matches_dense(layer, lambda xs: dense_halo(case, xs), inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank] + 1, P_world)


@pytest.mark.parametrize("extent, window", WINDOWS.values(), ids=WINDOWS.keys())
@distributed(ranks=[3, 4])
def test_windows(P_world: Partition, extent: int, window: SlidingWindow) -> None:
    """Each worker gets the cells its taps read: convolutions of the blocks are the whole's."""
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size])
    x = random((2, 1, extent))
    left, right = window.padding
    reach = window.dilation * (window.kernel - 1) + 1
    outputs = (extent + left + right - reach) // window.stride + 1

    def dense(xs: Tensors) -> Tensors:
        whole = torch.cat(xs, 2)
        needed = []
        for start, stop in balanced(outputs, P_world.size):
            first = start * window.stride - left
            last = (stop - 1) * window.stride - left + reach if start < stop else first
            needed.append(cut(whole, [(0, 2), (0, 1), (first, last)], [False] * 3))
        return needed

    layer = nn.HaloExchange(P_x, [window])
    inputs = blocks(x, P_x.shape)
    assert_matches_dense(layer, dense, inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank] + 1, P_world)
    weight = random((1, 1, window.kernel), seed=1)
    step = {"stride": window.stride, "dilation": window.dilation}
    padded = torch.nn.functional.pad(x, window.padding)
    whole = torch.nn.functional.conv1d(padded, weight, **step)
    start, stop = balanced(outputs, P_world.size)[P_world.rank]
    needed = layer(inputs[P_world.rank])
    if start < stop:
        mine = torch.nn.functional.conv1d(needed, weight, **step)
        torch.testing.assert_close(mine, whole[:, :, start:stop], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nested", [False, True], ids=["one stage", "nested"])
@distributed(ranks=12)
def test_twelve_ranks(P_world: Partition, nested: bool) -> None:
    case = Stencil((5, 7, 4), (2, 3, 2), ((1, 1), (3, 2), (1, 2)), (True, False, True))
    layer = nn.HaloExchange(
        P_world.create_cartesian_topology_partition(case.grid),
        halo=case.halo,
        periodic=case.periodic,
        nested=nested,
    )
    inputs = inputs_on(case, random(case.extents), 12)
    assert_matches_dense(layer, lambda xs: dense_halo(case, xs), inputs, P_world)


@distributed(ranks=4, transports=["nccl", "host"])
def test_chosen_exchanges(P_world: Partition) -> None:
    """Over NCCL, two stages if a group of messages costs nothing; other ranks may ask for them."""
    case = Stencil((5, 7), (2, 2), ((1, 2), (2, 1)), (False, True))
    P_x = P_world.create_cartesian_topology_partition(case.grid)
    over_nccl = P_x.transport == "nccl"
    layer = nn.HaloExchange(
        P_x,
        halo=case.halo,
        periodic=case.periodic,
        nested=over_nccl if P_world.rank in (1, 3) else None,
    )
    inputs = inputs_on(case, random(case.extents), 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halo_choice, "_GROUP_NS", 0)
        assert_matches_dense(layer, lambda xs: dense_halo(case, xs), inputs, P_world)
        assert_adjoint(layer, inputs[P_world.rank] + 1, P_world)
        assert len(layer.movement(inputs[P_world.rank]).steps) == (2 if over_nccl else 1)


@pytest.mark.parametrize("nested", [False, True], ids=["one stage", "nested"])
@distributed(ranks=4)
def test_padding_value(P_world: Partition, nested: bool) -> None:
    """Padding is a constant: no derivative sees it."""
    case = Stencil((5, 7), (2, 2), ((1, 2), (2, 1)), (False, False))
    P_x = P_world.create_cartesian_topology_partition(case.grid)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return halo_exchange(x, P_x, halo=case.halo, padding_value=-torch.inf, nested=nested)

    inputs = inputs_on(case, cells(case.extents), 4)
    x = inputs[P_world.rank].requires_grad_()
    y = layer(x)
    assert_same(y.detach(), dense_halo(case, inputs, -torch.inf)[P_world.rank].detach())
    gradient = torch.ones_like(y).requires_grad_()
    (adjoint,) = torch.autograd.grad(y, x, gradient, create_graph=True)
    (forward_again,) = torch.autograd.grad(adjoint, gradient, x.detach())
    assert_same(forward_again, dense_halo(case, inputs, 0.0)[P_world.rank].detach())

    def finite(x: torch.Tensor) -> torch.Tensor:
        return halo_exchange(x, P_x, halo=case.halo, padding_value=3.0, nested=nested)

    inputs = inputs_on(case, random(case.extents), 4)
    assert_matches_dense(finite, lambda xs: dense_halo(case, xs, 3.0), inputs, P_world)


@pytest.mark.parametrize("sizes", [[5, 0, 1, 3], [1, 1, 6, 1]], ids=str)
@distributed(ranks=4)
def test_unbalanced_input(P_world: Partition, sizes: list[int]) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 4])
    stops = np.cumsum([0, *sizes])

    def dense(xs: Tensors) -> Tensors:
        whole = torch.cat(xs, 1)
        needed = [(a - 2, b + 1) if a < b else (a, a) for a, b in pairwise(stops)]
        return [cut(whole, [(0, 2), cells], [False] * 2) for cells in needed]

    inputs = list(random((2, 9)).split(sizes, 1))
    assert_matches_dense(nn.HaloExchange(P_x, [HaloWidths(2, 1)]), dense, inputs, P_world)


@distributed(ranks=2)
def test_relu_in_place_after_it(P_world: Partition) -> None:
    """The output is a new tensor, so that what follows may overwrite it."""
    P_x = P_world.create_cartesian_topology_partition([2])
    x = (cells((4,)) - 2).requires_grad_()
    y = torch.relu_(halo_exchange(x, P_x, halo=((1, 1),)))
    y.sum().backward()
    ones = [[0.0, 0, 0, 2], [0.0, 0, 0, 1]][P_world.rank]
    assert_same(x.grad, torch.tensor(ones).double())


@distributed(ranks=3)
def test_toggled_grad_and_smaller_batch_agree_once(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 3])
    layer = nn.HaloExchange(P_x, halo=((1, 1),))
    for batch, wanted, started in ((4, True, 2), (4, False, 1), (3, False, 1), (4, True, 1)):
        before = operations(P_world)
        y = layer(local_input(cells((batch, 7)), P_x).requires_grad_(wanted))
        assert operations(P_world) - before == started + 1
        assert y.requires_grad == wanted


@distributed(ranks=3)
def test_changed_block(P_world: Partition) -> None:
    """Refused on every rank when static; agreed on when dynamic; known when the shape is given."""
    P_x = P_world.create_cartesian_topology_partition([3])
    case = Stencil((9,), (3,), ((1, 1),), (False,))
    layer = nn.HaloExchange(P_x, halo=case.halo)
    layer(torch.ones(2))
    mine = inputs_on(case, cells((9,)), 3)
    for known in ({"shape": "dynamic"}, {"global_shape": (9,)}):
        y = halo_exchange(mine[P_world.rank], P_x, halo=case.halo, **known)
        assert_same(y, dense_halo(case, mine)[P_world.rank])
    P_world.barrier()  # the refusal ends what others may still be busy with
    with pytest.raises(PlanMismatch, match=r"rank 2 .*\[2\].*\[3\].*shape='dynamic'"):
        layer(torch.ones(3 if P_world.rank == 2 else 2))
        P_world.barrier()


@distributed(ranks=2)
def test_refusals(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    with pytest.raises(ShapeError, match=r"kernel 9 .* 9 cells .* extent is 4"):
        halo_exchange(torch.ones(2), P_x, [SlidingWindow(9)])
    with pytest.raises(ShapeError, match="neither window nor halo is given"):
        nn.HaloExchange(P_x)
    with pytest.raises(ShapeError, match="window and halo are both given"):
        nn.HaloExchange(P_x, [SlidingWindow(3)], halo=[(1, 1)])
    with pytest.raises(PartitionError, match=r"2 windows .* 1 axes"):
        nn.HaloExchange(P_x, halo=((1, 1), (1, 1)))
    with pytest.raises(ShapeError, match="periodic has 2 entries for 1 dims"):
        nn.HaloExchange(P_x, halo=((1, 1),), periodic=[True, False])


@pytest.mark.parametrize("options", [{}, {"shape": "dynamic"}])
@distributed(ranks=[2, 3])
def test_widths_that_differ_between_ranks_are_refused(
    P_world: Partition, options: dict[str, object]
) -> None:
    """All ranks raise before the first ghost and list all widths; equal widths still work."""
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    x = torch.ones(12 // P_world.size)
    own = [[(0, 1)], [(2, 0)], [(1, 1)]][P_world.rank]
    for _ in range(2):
        with pytest.raises(PlanMismatch, match=r"halo widths, .* differ") as caught:
            halo_exchange(x, P_x, halo=own, **options)
        assert "rank 0: halo=[(0, 1)], periodic=[False]" in str(caught.value)
        assert "rank 1: halo=[(2, 0)], periodic=[False]" in str(caught.value)
    layer = nn.HaloExchange(P_x, halo=[(1, 1)], periodic=P_world.rank == 0, **options)
    with pytest.raises(PlanMismatch, match=r"rank 0: .* periodic=.True"):
        layer(x)
    assert halo_exchange(x, P_x, halo=[(1, 1)], **options).shape == (len(x) + 2,)
