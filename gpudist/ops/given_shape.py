"""Check of a block against a given global shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from gpudist.errors import ShapeError
from gpudist.world.partition import Partition


def wrong_block(
    name: str,
    P_x: Partition,
    shape: Sequence[int],
    expected: Sequence[int],
    global_shape: Sequence[int],
    grid: Sequence[int],
) -> ShapeError | None:
    """Return the error for a tensor that is not this rank's balanced block of a known global shape.

    Args:
        name: name of the operator or input, for the error.
        P_x: partition of the blocks.
        found: shape of the tensor.
        own, whole: shapes of the expected block, and of the global tensor.
        grid: grid that splits the tensor; dims that are not split may differ.
    """
    split = [d for d, parts in enumerate(grid) if parts > 1]
    fits = len(shape) == len(global_shape)
    if fits and all(shape[d] == expected[d] for d in split):
        return None
    if fits and all(shape[d] == global_shape[d] for d in range(len(grid)) if d or d in split):
        what = "the whole tensor"
        remedy = "was scatter forgotten? call gpudist.scatter(x, P_x), or slice it"
    elif turned := fits and _in_order_of(shape, global_shape, grid):
        what = "another block"
        remedy = f"give the extents in the order of the tensor's dims, as {turned} are"
    else:
        what = "another block"
        remedy = (
            "pass the balanced block, as returned by gpudist.scatter(x, P_x), or omit "
            "global_shape= if blocks are not balanced"
        )
    return ShapeError(
        f"{name}, rank {P_x.rank} of {P_x!r}: got {list(shape)}, {what}; this worker's block of "
        f"the global shape {list(global_shape)} is {list(expected)}: {remedy}"
    )


def _in_order_of(
    shape: Sequence[int], global_shape: Sequence[int], grid: Sequence[int]
) -> list[int] | None:
    for order in permutations(global_shape):
        blocks = zip(shape, order, grid, strict=True)
        if order != tuple(global_shape) and all(
            n // k <= expected <= -(-n // k) for expected, n, k in blocks
        ):
            return list(order)
    return None
