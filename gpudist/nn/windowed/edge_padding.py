"""Padding that copies cells of a block, after its ghosts have been received."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import ShapeError
from gpudist.exchange.arrangement import Arrangement, bind_arrangement
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.halo import needed_range
from gpudist.geometry.windows import FoldedWindow, Window, require_padding_fits
from gpudist.world.partition import CartesianPartition


def bind_edge_padding(
    name: str,
    inputs: Decomposition,
    windows: Sequence[Window],
    P: CartesianPartition,
    shape: Sequence[int],
    dtype: torch.dtype,
    of_own_block: bool = False,
) -> Arrangement | None:
    """Return the padding of a block to all cells that its windows read; ``None`` if it adds none.

    Args:
        name: name of the layer.
        inputs: decomposition of the input.
        windows: windows of the layer, one per dim.
        P: partition of the workers that pad; this worker must have outputs.
        shape: shape of the block to pad.
        dtype: dtype of the block.
        of_own_block: whether to pad the worker's own block, because no worker needs ghosts, instead
            of the result of a halo exchange.
    """
    assert P.index is not None
    cells: dict[int, list[int]] = {}
    for d, (blocks, window, i) in enumerate(zip(inputs.dims, windows, P.index, strict=True)):
        if isinstance(window, FoldedWindow):
            first = blocks.block(i)[0] if of_own_block else needed_range(blocks, window, i)[0]
            read = range(*needed_range(blocks, window.window, i))
            cells[d] = [window.copied(cell, blocks.extent) - first for cell in read]
    return bind_arrangement(cells, shape, P, f"edge padding of {name}", dtype)


def require_padding_of_input(
    name: str,
    mode: str,
    paddings: Sequence[tuple[int, int]],
    extents: Sequence[int],
) -> None:
    """Raise if the extents of an input do not fit the padding, like torch's layer.

    Raises:
        ShapeError: on every rank alike, naming the layer and the dim.
    """
    for d, (padding, extent) in enumerate(zip(paddings, extents, strict=True)):
        try:
            require_padding_fits(mode, padding, extent)
        except ShapeError as error:
            raise ShapeError(f"{name}, dim {d + 2}: {error}") from None
