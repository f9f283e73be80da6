"""Padding that copies cells of a block, after its ghosts have been received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.halo import needed_range
from gpudist.geometry.windows import CopyingMode, FoldedWindow, Window, require_padding_fits


@dataclass(frozen=True)
class EdgePadding:
    """Padding of a block to all cells that its windows read; local and differentiable.

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
    dims: Sequence[Blocks],
    windows: Sequence[Window],
    index: Sequence[int],
    device: torch.device,
    of_own_block: bool = False,
) -> EdgePadding | None:
    """Return the padding that the worker at ``index`` adds to its block; ``None`` if it adds none.

    Args:
        dims: blocks of the input along its feature dims.
        windows: windows of the layer, one per feature dim.
        index: index of the worker along the feature dims; the worker must have outputs.
        device: device of the block.
        of_own_block: whether to pad the worker's own block, because no worker needs ghosts, instead
            of the result of a halo exchange.
    """
    mode: CopyingMode = "replicate"
    widths: list[int] = []
    cells: list[tuple[int, torch.Tensor]] = []
    for d, (blocks, window, i) in enumerate(zip(dims, windows, index, strict=True)):
        block = blocks.block(i) if of_own_block else needed_range(blocks, window, i)
        extent = blocks.extent
        read = window
        if isinstance(window, FoldedWindow):
            mode, read = window.mode, window.window
        low, high = needed_range(blocks, read, i)
        front, behind = max(0, -low), max(0, high - extent)
        if (max(low, 0), min(high, extent)) == block and _torch_pads(mode, block, front, behind):
            widths = [front, behind, *widths]
        else:
            widths = [0, 0, *widths]
            cells.append((d + 2, _copied(mode, low, high, extent, device) - block[0]))
    padding = EdgePadding(mode, tuple(widths), tuple(cells))
    return padding if padding.cells or any(padding.widths) else None


def _torch_pads(mode: CopyingMode, block: tuple[int, int], front: int, behind: int) -> bool:
    return mode == "replicate" or max(front, behind) < block[1] - block[0]


def _copied(
    mode: CopyingMode, low: int, high: int, extent: int, device: torch.device
) -> torch.Tensor:
    cells = torch.arange(low, high, device=device)
    if mode == "replicate":
        return cells.clamp(0, extent - 1)
    last = extent - 1
    return last - (last - cells.abs()).abs()


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
