"""Parts of global tensors by hand, and whole ones from parts."""

from __future__ import annotations

import torch

from gpudist.exchange import all_reduce
from gpudist.geometry.cartesian import index_of, rank_of
from gpudist.geometry.layout import Layout, broadcast, partial_sum, split
from gpudist.world.partition import Partition

S, B, P = split, broadcast, partial_sum


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def index_in(layout: Layout, rank: int) -> tuple[int, ...]:
    return index_of(layout.ranks.index(rank), layout.grid)


def part_of(x: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The part of ``rank``; terms are random, the last is what is missing."""
    if rank not in layout.ranks:
        return x.new_empty(0)
    index = index_in(layout, rank)
    sums = [a for a, one in enumerate(layout.sbp) if one == P]
    for axis in sums:
        terms = [random(tuple(x.shape), 100 * axis + i) for i in range(layout.grid[axis] - 1)]
        last = x - sum(terms, torch.zeros_like(x))
        x = [*terms, last][index[axis]]
    return x[layout.box(index).slices].clone()


def whole_of(part: torch.Tensor, layout: Layout, P_world: Partition) -> torch.Tensor:
    """Return the global tensor, on all ranks, from the first copy of every part."""
    whole = torch.zeros(layout.shape, dtype=part.dtype)
    rank = P_world.rank
    assert rank is not None
    if rank in layout.ranks:
        index = index_in(layout, rank)
        if not any(i for i, one in zip(index, layout.sbp, strict=True) if one == B):
            whole[layout.box(index).slices] = part.detach()
    return all_reduce(whole, P_world)


def assert_parts(
    part: torch.Tensor, x: torch.Tensor, layout: Layout, P_world: Partition, what: str = ""
) -> None:
    """The parts in ``layout`` make up ``x``, and all copies of a part are alike."""
    torch.testing.assert_close(whole_of(part, layout, P_world), x, msg=lambda m: f"{what}: {m}")
    assert P_world.rank is not None
    parts = torch.zeros((P_world.size, *x.shape), dtype=part.dtype)
    if P_world.rank in layout.ranks:
        parts[P_world.rank][layout.boxes[P_world.rank].slices] = part.detach()
    parts = all_reduce(parts, P_world)
    for rank in layout.ranks:
        index = index_in(layout, rank)
        first = [0 if one == B else i for i, one in zip(index, layout.sbp, strict=True)]
        copied = layout.ranks[rank_of(first, layout.grid)]
        torch.testing.assert_close(parts[rank], parts[copied], msg=lambda m: f"{what}, copies: {m}")
