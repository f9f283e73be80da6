"""The boxes of a periodic halo of one cell around a block."""

from __future__ import annotations

from itertools import product
from math import prod

from gpudist.geometry.boxes import Box, Move, contiguous_strides
from gpudist.transport.nccl.program import BufferName, BufferView


def neighbours(block: tuple[int, ...], faces_only: bool = False) -> list[Move]:
    """Return the boxes a block sends to its neighbours, and where each arrives in its padded block.

    All ranks number the boxes in the same way: box i of a neighbour arrives as box i. Large boxes
    are first, so that all of them begin at a multiple of 16 bytes in a buffer.
    """
    found: list[Move] = []
    for direction in product((-1, 0, 1), repeat=len(block)):
        if direction == (0,) * len(block) or (faces_only and sum(map(abs, direction)) > 1):
            continue
        given = [_range(side, n) for side, n in zip(direction, block, strict=True)]
        arrives = [
            (1, n + 1) if side == 0 else ((n + 1, n + 2) if side < 0 else (0, 1))
            for side, n in zip(direction, block, strict=True)
        ]
        found.append(Move(_box(given), _box(arrives)))
    return sorted(found, key=lambda move: -move.source.volume)


def view(buffer: BufferName, shape: tuple[int, ...], box: Box) -> BufferView:
    """Return a view of the cells of a box in a contiguous tensor of ``shape``."""
    strides = contiguous_strides(shape)
    offset = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    return BufferView(buffer, offset, strides)


def starts(moves: list[Move]) -> list[int]:
    """Return where each box begins when boxes are stored consecutively, and where the last ends."""
    volumes = [prod(move.source.shape) for move in moves]
    return [sum(volumes[:i]) for i in range(len(volumes) + 1)]


def _range(side: int, n: int) -> tuple[int, int]:
    return {-1: (0, 1), 0: (0, n), 1: (n - 1, n)}[side]


def _box(ranges: list[tuple[int, int]]) -> Box:
    return Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))
