"""A ring: workers along an axis pass the blocks of a tensor on to the next worker."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.boxes import Box, Message, Plan, Stage


def held_block(rank: int, step: int, parts: int) -> int:
    """Which block the worker ``rank`` of a ring of ``parts`` holds after so many hops."""
    return (rank - step) % parts


def plan_ring_hop(
    blocks: Blocks, dim: int, shape: Sequence[int], rank: int, step: int, key: tuple[object, ...]
) -> Plan:
    """Plan of one worker: the block it holds after ``step`` hops in, the one after the next out.

    Every hop is a permutation of the blocks: its adjoint is the hop back.

    Args:
        blocks: the cut of the dim ``dim``, one block per worker.
        dim: of the tensor, which only this one is cut in.
        shape: of this worker's own block, whose extent in ``dim`` is of no account.
        rank: of the worker in the ring.
        step: from 0.
        key: what else the operator is known by, the same on all workers.
    """
    parts = blocks.parts

    def held(after: int) -> tuple[int, ...]:
        length = blocks.length(held_block(rank, after, parts))
        return (*shape[:dim], length, *shape[dim + 1 :])

    now, then = Box.whole(held(step)), Box.whole(held(step + 1))
    stage = Stage(
        now.shape,
        then.shape,
        sends=(Message((rank + 1) % parts, (now,)),) if now.volume else (),
        receives=(Message((rank - 1) % parts, (then,)),) if then.volume else (),
    )
    extents = (*shape[:dim], blocks, *shape[dim + 1 :])
    return Plan(("ring hop", extents, step, *key), rank, (stage,))
