"""Halo exchange for a kernel of 3 cells with padding 1, with equal blocks on all GPUs."""

from __future__ import annotations

from math import prod

import torch

from benchmarks.case import Side
from benchmarks.gpu.kernel import equal_to
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.several import torchs
from benchmarks.gpu.several.cells import grid_of, own
from benchmarks.stencil import Slices, Stencil
from gpudist import SlidingWindow
from gpudist.ops import HaloExchange
from gpudist.world.partition import Partition

BLOCKS = ((1, 4, 64, 64, 64), (1, 16, 2048, 2048), (1, 8, 256, 256, 256))
TINY = ((1, 2, 6, 4), (1, 2, 4, 3, 2))


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are those that the busiest rank sends."""
    found: list[GpuCase] = []
    for block in TINY if tiny else BLOCKS:
        grid = grid_of(ranks, len(block))
        shape = tuple(n * parts for n, parts in zip(block, grid, strict=True))
        name = f"[{','.join(map(str, block))}] a rank on [{','.join(map(str, grid))}]"
        sent = max(_sent_cells(Stencil(shape, grid, rank)) for rank in range(ranks))
        found.append(GpuCase("halo", name, ranks, 4 * sent, {"shape": shape, "grid": grid}))
    return found


def _sent_cells(stencil: Stencil) -> int:
    return sum(prod(_shape(sent)) for _, sent, _ in stencil.neighbours)


def _shape(cells: Slices) -> list[int]:
    return [cell.stop - cell.start for cell in cells]


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    """Return the sides.

    Torch packs, exchanges and unpacks; its packed messages alone are a bound.
    """
    shape, grid = case.parameters["shape"], case.parameters["grid"]
    stencil = Stencil(shape, grid, P_world.rank or 0)
    P_x = P_world.create_cartesian_topology_partition(grid)
    x, needed = own(shape, P_x), own(shape, P_x, width=1)
    halo = HaloExchange(P_x, [SlidingWindow(3, padding=(1, 1))] * (len(shape) - 2))
    around = [(peer, x[sent].contiguous(), cells) for peer, sent, cells in stencil.neighbours]
    ghosts = [(peer, torch.zeros_like(needed[cells])) for peer, _, cells in around]
    sent = [(peer, packed) for peer, packed, _ in around]

    def by_torch() -> torch.Tensor:
        y = x.new_zeros(needed.shape)
        y[stencil.inner] = x
        sends = [(peer, x[cells].contiguous()) for peer, cells, _ in stencil.neighbours]
        arriving = [(peer, torch.empty_like(ghost)) for peer, ghost in ghosts]
        torchs.exchange(sends, arriving)
        for (_, ghost), (_, _, cells) in zip(arriving, around, strict=True):
            y[cells] = ghost
        return y

    def messages() -> list[torch.Tensor]:
        torchs.exchange(sent, ghosts)
        return [ghost for _, ghost in ghosts]

    def arrived(found: list[torch.Tensor]) -> bool:
        return all(torch.equal(g, needed[c]) for g, (_, _, c) in zip(found, around, strict=True))

    is_right = equal_to(needed)
    return {
        "gpudist": Side(lambda: halo(x), is_right),
        torchs.named("batch_isend_irecv", P_world): Side(by_torch, is_right),
        torchs.named("messages alone", P_world): Side(
            messages, arrived, lambda: [ghost.zero_() for _, ghost in ghosts]
        ),
    }
