"""Halo exchange for a kernel of 3 cells with padding 1 in every spatial dim."""

from __future__ import annotations

from math import prod

import torch

from benchmarks.case import Case, Side, equals, pattern
from benchmarks.peers import gloo
from benchmarks.stencil import Stencil
from gpudist import SlidingWindow
from gpudist.ops import HaloExchange
from gpudist.world.partition import Partition

SHAPES = ((1, 8, 256, 256), (1, 16, 1024, 1024), (1, 4, 64, 64, 64))


def cases(ranks: int) -> list[Case]:
    """Return the cases. Shapes are global; bytes are those rank 0 sends, the most of any rank."""
    found: list[Case] = []
    for shape in SHAPES:
        grid = grid_of(ranks, len(shape))
        stencil = Stencil(shape, grid, 0)
        name = f"{list(shape)} on {list(grid)}".replace(" ", "").replace("on", " on ")
        sent = sum(prod(_shape(stencil, cells)) for _, cells, _ in stencil.neighbours)
        found.append(
            Case(
                "halo", name, ranks, sent * 4,
                {"shape": shape, "grid": grid}, prod(stencil.needed_shape) * 4,
            )
        )  # fmt: skip
    return found


def grid_of(ranks: int, dims: int) -> tuple[int, ...]:
    """Return the grid: two ranks along the first spatial axis, the others along the second."""
    return (1, 1, 2, ranks // 2) + (1,) * (dims - 4)


def _shape(stencil: Stencil, cells: tuple[slice, ...]) -> list[int]:
    return [cell.stop - cell.start for cell in cells]


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides.

    Peers: gloo's isend and irecv with packing; a copy of the block; its clone.
    """
    gloo.start(P_world)
    shape, grid = case.parameters["shape"], case.parameters["grid"]
    stencil = Stencil(shape, grid, P_world.rank or 0)
    whole = pattern(prod(shape), 0).reshape(shape)
    needed = stencil.needed(whole)
    block = whole[stencil.block].copy()
    x = torch.from_numpy(block)
    P_x = P_world.create_cartesian_topology_partition(grid)
    exchange = HaloExchange(P_x, [SlidingWindow(3, padding=(1, 1))] * (len(shape) - 2))

    def local_copy() -> torch.Tensor:
        y = torch.empty(stencil.needed_shape)
        for cells in stencil.padding:
            y[cells] = 0
        y[stencil.inner] = x
        return y

    def gloo_exchange() -> torch.Tensor:
        y = local_copy()
        sends = [(peer, x[sent].contiguous()) for peer, sent, _ in stencil.neighbours]
        ghosts = [(peer, y[cells]) for peer, _, cells in stencil.neighbours]
        receives = [(peer, torch.empty(cells.shape)) for peer, cells in ghosts]
        gloo.exchange(sends, receives)
        for (_, cells), (_, buffer) in zip(ghosts, receives, strict=True):
            cells.copy_(buffer)
        return y

    def copied(y: torch.Tensor) -> bool:
        for _, _, cells in stencil.neighbours:
            y[cells] = torch.from_numpy(needed[cells])
        return equals(needed)(y)

    return {
        "gpudist": Side(lambda: exchange(x), equals(needed)),
        "gloo": Side(gloo_exchange, equals(needed)),
        "local copy": Side(local_copy, copied),
        "clone": Side(x.clone, equals(block)),
    }
