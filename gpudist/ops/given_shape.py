"""The check of a block against a global shape that the program has given."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.errors import ShapeError
from gpudist.world.partition import Partition


def wrong_block(
    name: str,
    P_x: Partition,
    found: Sequence[int],
    own: Sequence[int],
    whole: Sequence[int],
    grid: Sequence[int],
) -> ShapeError | None:
    """The error of a tensor that is not this rank's balanced block of a tensor of a known shape.

    Args:
        name: the operator or input, for the error.
        P_x: owns the blocks.
        found: shape of the tensor.
        own, whole: shapes of the block that is expected, and of the global tensor.
        grid: how it is cut. Dims that are not may differ.
    """
    split = [d for d, parts in enumerate(grid) if parts > 1]
    fits = len(found) == len(whole)
    if fits and all(found[d] == own[d] for d in split):
        return None
    if fits and all(found[d] == whole[d] for d in split):
        what = "the whole tensor"
        remedy = "was scatter forgotten? call gpudist.scatter(x, P_x), or slice it"
    else:
        what = "another block"
        remedy = (
            "give it the balanced block, as gpudist.scatter(x, P_x) does, or leave out "
            "global_shape= if blocks are not balanced"
        )
    return ShapeError(
        f"{name}, rank {P_x.rank} of {P_x!r}: got {list(found)}, {what}; this worker's block of "
        f"the global shape {list(whole)} is {list(own)}: {remedy}"
    )
