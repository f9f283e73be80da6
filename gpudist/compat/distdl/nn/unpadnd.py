"""Removal of cells on the sides of a block."""

from __future__ import annotations

from typing import Any

from gpudist.compat.distdl.nn.padnd import PadNd


class UnpadNd(PadNd):
    """Remove cells from the sides of a block.

    Args:
        pad_width: array of shape ``[dims, 2]`` with the cells on the left and right; ``None``
            removes nothing.
        value: ignored.
    """

    def __init__(self, pad_width: Any, value: float = 0) -> None:
        super().__init__(None if pad_width is None else [[-a, -b] for a, b in pad_width], value)
