"""Padding that copies cells of a block: what is left to do once its ghosts are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.halo import needed_range
from gpudist.geometry.padding import (
    CopyingMode,
    FoldedWindow,
    require_padding_fits,
)
from gpudist.geometry.windows import Window


@dataclass(frozen=True)
class EdgePadding:
    """Gives a block every cell its windows read; differentiable, and local.

    Attributes:
        mode: of the padding, where torch can pad the block as if it were whole.
        widths: of the padding on both sides, last dim first, as torch's ``pad`` takes them.
        cells: for each dim where torch cannot, the cells of the block to take, in order.
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
    """What the worker at ``index`` has to do to its block, if anything.

    Args:
        dims: how the input is cut, from the first dim of features on.
        windows: one per such dim.
        index: of the worker, along these dims; it has outputs.
        device: of the block.
        of_own_block: the block is the worker's own one, since no worker needs ghosts, and not what
            a halo exchange gives.
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
    """Whether what padding copies lies in the block, as far from its ends as from the edge's."""
    return mode == "replicate" or max(front, behind) < block[1] - block[0]


def _copied(
    mode: CopyingMode, low: int, high: int, extent: int, device: torch.device
) -> torch.Tensor:
    """The cells inside the global extent that cells ``[low, high)`` are or are copies of."""
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
    """Refuse an input that torch's layer refuses for its padding, naming layer and dim.

    Raises:
        ShapeError: on every rank alike.
    """
    for d, (padding, extent) in enumerate(zip(paddings, extents, strict=True)):
        try:
            require_padding_fits(mode, padding, extent)
        except ShapeError as error:
            raise ShapeError(f"{name}, dim {d + 2}: {error}") from None
