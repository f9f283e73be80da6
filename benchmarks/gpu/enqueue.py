"""Host time of a whole halo exchange: pack, messages, unpack, a new output.

Targets: at most half of torch's ``batch_isend_irecv`` of the same messages, for 6 and for 26
neighbours; at most 10 us as a graph.

``bound`` is a hand-made stage in which every neighbour is the same rank: ranks 2i and 2i+1 exchange
one message per neighbour. In a world of one the neighbour is the rank itself, and NCCL carries the
messages. ``HaloExchange`` is the operator, cut over the ranks in the first dim; neighbours on the
same rank share a message, and a world of one copies its halo without messages.
"""

from __future__ import annotations

import torch

from benchmarks.case import Side
from benchmarks.gpu import torch_messages
from benchmarks.gpu.boxes import neighbours, starts, view
from benchmarks.gpu.kernel import bound, equal_to
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.self_halo import exchange_of
from gpudist.geometry.boxes import Box, Move, contiguous_strides
from gpudist.transport.nccl.program import (
    BufferView,
    CombineJob,
    Lowered,
    NcclStep,
)
from gpudist.world.partition import Partition

EXTENT, TINY = 32, 6
F32 = torch.float32


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are the ghost cells."""
    extent = TINY if tiny else EXTENT
    found: list[GpuCase] = []
    for count, how in ((6, "bound"), (26, "bound"), (26, "HaloExchange"), (26, "graph")):
        nbytes = 4 * starts(neighbours((extent,) * 3, count == 6))[-1]
        parameters = {"extent": extent, "neighbours": count, "how": how}
        name = f"{count} neighbours, {how}"
        found.append(GpuCase("enqueue", name, ranks, nbytes, parameters, clock="enqueue"))
    return found


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    extent, how = case.parameters["extent"], case.parameters["how"]
    block = (extent,) * 3
    moves = neighbours(block, case.parameters["neighbours"] == 6)
    if how == "bound":
        ours = by_messages(P_world, block, moves)
    else:
        ours = _operator(P_world, block, machine if how == "graph" else None)
    sizes = [move.source.volume for move in moves]
    return {"gpudist": ours, **torch_messages.sides(P_world, sizes, lambda rank: 100 * rank)}


def _block(block: tuple[int, ...], rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 251, block, generator=generator).float()


def by_messages(P_world: Partition, block: tuple[int, ...], moves: list[Move]) -> Side:
    """Return a halo of one cell by one message per box, all of them to and from one peer."""
    rank = P_world.rank or 0
    peer = rank ^ 1 if P_world.size > 1 else rank
    x = _block(block, rank).to(P_world.device)
    theirs = _block(block, peer).to(P_world.device)
    padded = tuple(n + 2 for n in block)
    own = Move(Box.whole(block), Box.whole(block).relative_to((-1,) * len(block)))
    lowered = _lowered(block, moves, peer)
    lowered.after.append(_copied(own, block))

    def make() -> torch.Tensor:
        return torch.empty(padded, dtype=F32, device=P_world.device)

    def is_right(y: torch.Tensor) -> bool:
        return torch.equal(y[own.destination.slices], x) and all(
            torch.equal(y[move.destination.slices], theirs[move.source.slices]) for move in moves
        )

    return Side(bound(P_world, lowered, x, make, f"{len(moves)} messages of {block}"), is_right)


def _copied(move: Move, block: tuple[int, ...]) -> CombineJob:
    padded = tuple(n + 2 for n in block)
    to, source = view("output", padded, move.destination), view("input", block, move.source)
    return CombineJob(move.source.shape, to, (source,))


def _lowered(block: tuple[int, ...], moves: list[Move], peer: int) -> Lowered:
    """Lower the boxes to one message each, all of them to and from ``peer``."""
    padded = tuple(n + 2 for n in block)
    lowered = Lowered(F32)
    receives: list[NcclStep] = []
    for move in moves:
        shape, nbytes = move.source.shape, move.source.volume * 4
        strides = contiguous_strides(shape)
        at, to = lowered.room("sent", nbytes), lowered.room("received", nbytes)
        source = view("input", block, move.source)
        lowered.before.append(CombineJob(shape, BufferView("sent", at // 4, strides), (source,)))
        lowered.steps.append(NcclStep("send", None, peer, "sent", at, "sent", 0, nbytes, "uint8"))
        receives.append(
            NcclStep("receive", None, peer, "input", 0, "received", to, nbytes, "uint8")
        )
        ghosts = view("output", padded, move.destination)
        lowered.after.append(CombineJob(shape, ghosts, (BufferView("received", to // 4, strides),)))
    lowered.steps += receives
    return lowered


def _operator(P_world: Partition, block: tuple[int, ...], machine: Machine | None) -> Side:
    """Return the operator on a block, or the graph that a ``machine`` captures of it."""
    rank, extent = P_world.rank or 0, block[0]
    whole = torch.cat([_block(block, r) for r in range(P_world.size)])[None, None]
    near = torch.arange(rank * extent - 1, (rank + 1) * extent + 1) % whole.shape[2]
    wide = [torch.arange(-1, n + 1) % n for n in block[1:]]
    expected = whole[:, :, near][:, :, :, wide[0]][..., wide[1]].to(P_world.device)
    x = _block(block, rank)[None, None].to(P_world.device)
    exchange = exchange_of(tuple(x.shape), P_world)

    def call() -> torch.Tensor:
        return exchange(x)

    return Side(call if machine is None else machine.capture(call), equal_to(expected))
