"""Ring exchange: workers along an axis pass blocks of a tensor to the next worker."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.boxes import Box, Message, Plan, Stage


def held_block(rank: int, step: int, parts: int) -> int:
    """Return the block that worker ``rank`` of a ring of ``parts`` holds after ``step`` hops."""
    return (rank - step) % parts


def plan_ring_hop(
    blocks: Blocks, dim: int, shape: Sequence[int], rank: int, step: int, key: tuple[object, ...]
) -> Plan:
    """Plan one worker's movement from the block it holds after ``step`` hops to the next one.

    Every hop is a permutation of the blocks; its adjoint is the hop back.

    Args:
        blocks: cut of the dim ``dim``, one block per worker.
        dim: the only dim of the tensor that is split.
        shape: shape of this worker's own block; its extent in ``dim`` is ignored.
        rank: rank of the worker in the ring.
        step: number of hops so far, from 0.
        key: further identification of the operator, the same on all workers.
    """
    parts = blocks.parts

    def shape_held(after: int) -> tuple[int, ...]:
        length = blocks.length(held_block(rank, after, parts))
        return (*shape[:dim], length, *shape[dim + 1 :])

    now, then = Box.whole(shape_held(step)), Box.whole(shape_held(step + 1))
    stage = Stage(
        now.shape,
        then.shape,
        sends=(Message((rank + 1) % parts, (now,)),) if now.volume else (),
        receives=(Message((rank - 1) % parts, (then,)),) if then.volume else (),
    )
    extents = (*shape[:dim], blocks, *shape[dim + 1 :])
    return Plan(("ring hop", extents, step, *key), rank, (stage,))
