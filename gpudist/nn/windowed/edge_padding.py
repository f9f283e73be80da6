"""Padding that copies cells of a block, after its ghosts have been received."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange.arrangement import bind_arrangement
from gpudist.geometry.halo import needed_range
from gpudist.geometry.windows import (
    CopyingMode,
    FoldedWindow,
    Window,
    require_padding_fits,
    source_cell,
)
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.ops.operator import own_index
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.world.partition import CartesianPartition

_COPYING_MODES: dict[str, CopyingMode] = {"reflect": "reflect", "replicate": "replicate"}
Pad = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _TorchPadding:
    """Padding by torch's functions, of which those for CPUs are fast.

    Attributes:
        mode: padding mode for dims along which torch can pad the block like a whole tensor.
        widths: cells of padding on both sides, last dim first, in the order of torch's ``pad``.
        cells: for the other dims, the indices of the block's cells to gather, in order.
    """

    mode: CopyingMode
    widths: tuple[int, ...]
    cells: tuple[tuple[int, torch.Tensor], ...]

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        for dim, cells in self.cells:
            block = block.index_select(dim, cells)
        return F.pad(block, self.widths, self.mode) if any(self.widths) else block


def bind_edge_padding(
    name: str,
    layout: BlockLayout,
    windows: Sequence[Window],
    P: CartesianPartition,
    x: torch.Tensor,
    moved: Sequence[int] | None,
) -> Pad | None:
    """Return the padding of a block to all cells that its windows read; ``None`` if it adds none.

    It is local and differentiable. On a GPU, all dims take one launch, in forward and in backward,
    where torch's functions for the gradient add in no fixed order.

    Args:
        name: name of the layer.
        layout: layout of the input.
        windows: windows of the layer, one per dim.
        P: partition of the workers that pad; this worker must have outputs.
        x: this worker's input.
        moved: shape of the result of the halo exchange; ``None`` to pad the worker's own block,
            because no worker needs ghosts.
    """
    inputs, index = layout.decomposition, own_index(P)
    mode: CopyingMode = "replicate"
    widths: list[int] = []
    places: dict[int, list[int]] = {}
    gathered: list[tuple[int, torch.Tensor]] = []
    features = zip(inputs.dims[2:], windows[2:], index[2:], strict=True)
    for d, (blocks, window, i) in enumerate(features, start=2):
        block = blocks.block(i) if moved is None else needed_range(blocks, window, i)
        extent = blocks.extent
        read = window
        if isinstance(window, FoldedWindow):
            mode, read = window.mode, window.window
        low, high = needed_range(blocks, read, i)
        places[d] = [source_cell(mode, cell, extent) - block[0] for cell in range(low, high)]
        front, behind = max(0, -low), max(0, high - extent)
        is_whole = (max(low, 0), min(high, extent)) == block
        # Torch reflects at most all but one of the block's cells.
        if is_whole and (mode == "replicate" or max(front, behind) < block[1] - block[0]):
            widths = [front, behind, *widths]
        else:
            widths = [0, 0, *widths]
            gathered.append((d, torch.tensor(places[d], device=x.device)))
    if not suits_cpu(x):
        shape = inputs.block(index).shape if moved is None else moved
        return bind_arrangement(places, shape, P, f"padding of {name}", layout.dtype)
    padding = _TorchPadding(mode, tuple(widths), tuple(gathered))
    return padding if padding.cells or any(padding.widths) else None


def with_padding_mode(window: Window, mode: str) -> Window:
    """Return ``window`` with copies beyond the edge, if torch's padding ``mode`` makes copies."""
    copying = _COPYING_MODES.get(mode)
    return window if copying is None else FoldedWindow(window, copying)


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
