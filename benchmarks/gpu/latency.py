"""The 26 boxes of a 3-D halo, at most 256 KiB together, in one launch: GPU time and enqueue time.

Targets: at most 4 us on the GPU to pack, and 4 us to unpack.
"""

from __future__ import annotations

import torch

from benchmarks.case import Side
from benchmarks.gpu.boxes import neighbours, starts, view
from benchmarks.gpu.kernel import bound, equal_to, random
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from gpudist.geometry.boxes import contiguous_strides
from gpudist.transport.nccl.program import (
    BufferName,
    BufferView,
    CombineJob,
    Lowered,
)
from gpudist.world.partition import Partition

EXTENT, TINY = 96, 8
F32 = torch.float32


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are the cells, read and written."""
    block = (TINY if tiny else EXTENT,) * 3
    nbytes = 4 * starts(neighbours(block))[-1]
    return [
        GpuCase(
            "latency", f"{kind} 26 boxes of {nbytes} bytes, {clock}", ranks, 2 * nbytes,
            {"kind": kind, "block": block}, clock=clock,
        )
        for kind in ("pack", "unpack")
        for clock in ("device", "enqueue")
    ]  # fmt: skip


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    """Return the sides. Torch packs by one ``cat``, and unpacks by one or several ``copy_``."""
    block = case.parameters["block"]
    padded = tuple(n + 2 for n in block)
    moves, at = neighbours(block), starts(neighbours(block))
    whole = random(block if case.parameters["kind"] == "pack" else padded, F32, P_world.device)
    packed = random((at[-1],), F32, P_world.device)
    if case.parameters["kind"] == "pack":
        jobs = [
            CombineJob(move.source.shape, _of_packed("output", at[i], move.source.shape),
                (view("input", block, move.source),))
            for i, move in enumerate(moves)
        ]  # fmt: skip
        pieces = [whole[move.source.slices] for move in moves]
        is_right = equal_to(torch.cat([piece.reshape(-1) for piece in pieces]))

        def by_cat() -> torch.Tensor:
            return torch.cat([piece.reshape(-1) for piece in pieces], out=packed)

        ours = bound(P_world, Lowered(F32, after=jobs), whole, lambda: packed)
        return {
            "gpudist": Side(ours, is_right, lambda: packed.fill_(9)),
            "torch cat": Side(by_cat, is_right, lambda: packed.fill_(9)),
        }
    jobs = [
        CombineJob(move.source.shape, view("output", padded, move.destination),
            (_of_packed("input", at[i], move.source.shape),))
        for i, move in enumerate(moves)
    ]  # fmt: skip
    ghosts = [whole[move.destination.slices] for move in moves]
    pieces = [packed[at[i] : at[i + 1]].reshape(move.source.shape) for i, move in enumerate(moves)]

    def by_copies() -> torch.Tensor:
        for ghost, piece in zip(ghosts, pieces, strict=True):
            ghost.copy_(piece)
        return whole

    def by_foreach() -> torch.Tensor:
        torch._foreach_copy_(ghosts, pieces)
        return whole

    def clear() -> None:
        torch._foreach_zero_(ghosts)

    is_right = equal_to(by_copies().clone())
    ours = bound(P_world, Lowered(F32, after=jobs), packed, lambda: whole, "unpack")
    return {
        "gpudist": Side(ours, is_right, clear),
        "torch copy_": Side(by_copies, is_right, clear),
        "torch foreach": Side(by_foreach, is_right, clear),
    }


def _of_packed(buffer: BufferName, start: int, shape: tuple[int, ...]) -> BufferView:
    return BufferView(buffer, start, contiguous_strides(shape))
