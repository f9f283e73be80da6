"""Draw the process grid: the owners of blocks, and the messages of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Stage
from gpudist.geometry.cartesian import index_of
from gpudist.pictures.page import WIDEST_PANEL_IN, Panel, box, label, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Width of a slot in a large map and in a small one, height by width, and width of a small map.
LEAST_SLOT_IN, MOST_SLOT_IN, SLOT_HEIGHT, SMALL_MAP_IN = 0.62, 1.05, 0.8, 2.4
# Shares of a slot that the largest block fills, and a block with hardly any cells.
FILLED, LEAST_FILLED = 0.92, 0.4
# Neighbours, including diagonal ones, have different colours.
COLORS = (
    *("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462"),
    *("#b3de69", "#fccde5", "#d9d9d9", "#d8a0d8", "#ccebc5", "#ffed6f"),
)
_COLOR_STEPS = (1, 5, 3, 7, 2)


def color_at(index: Sequence[int]) -> str:
    """Return the colour of the worker at ``index`` of the grid."""
    number = sum(i * step for i, step in zip(reversed(index), _COLOR_STEPS, strict=False))
    return COLORS[number % len(COLORS)]


@dataclass(frozen=True)
class GridMap:
    """Places of the workers' slots in a picture.

    Each slice of a 3-d grid is a separate table; a 1-d grid is a line, wrapped if it is long.

    Attributes:
        cut: decomposition of the whole tensor.
        dims: one to three dims that are drawn.
    """

    cut: Decomposition
    dims: tuple[int, ...]

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        return tuple(self.cut.dims[d] for d in self.dims)

    @property
    def _table(self) -> tuple[int, int]:
        return (self.blocks[-2].parts, self.blocks[-1].parts) if len(self.dims) > 1 else (1, 1)

    @property
    def slot_in(self) -> tuple[float, float]:
        """Width and height of a slot."""
        longest = max(blocks.parts for blocks in self.blocks[-2:])
        width = min(MOST_SLOT_IN, max(LEAST_SLOT_IN, SMALL_MAP_IN / longest))
        return width, width * SLOT_HEIGHT

    @property
    def whole_in(self) -> tuple[float, float]:
        """Width and height of the largest block in its slot."""
        return self.slot_in[0] * FILLED, self.slot_in[1] * FILLED

    @property
    def _slices(self) -> int:
        return self.blocks[0].parts if len(self.dims) != 2 else 1

    @property
    def _margins(self) -> tuple[float, float]:
        return {1: (0.0, 0.0), 2: (0.7, 0.34), 3: (0.7, 0.58)}[len(self.dims)]

    @property
    def _pitch(self) -> tuple[float, float]:
        rows, columns = self._table
        gap = 0.2 if len(self.dims) == 3 else 0.0
        left, top = self._margins
        return columns * self.slot_in[0] + left + gap, rows * self.slot_in[1] + top + gap

    @property
    def _on_a_line(self) -> int:
        return max(1, min(self._slices, int(WIDEST_PANEL_IN / self._pitch[0])))

    @property
    def size_in(self) -> tuple[float, float]:
        lines = -(-self._slices // self._on_a_line)
        return self._on_a_line * self._pitch[0], lines * self._pitch[1]

    def corner(self, index: Sequence[int]) -> tuple[float, float]:
        """Return the upper left corner of the slot at ``index`` of the grid, in inches."""
        at = [index[d] for d in self.dims]
        x, y = self._origin(at[0] if len(at) != 2 else 0)
        row, column = at[-2:] if len(at) > 1 else (0, 0)
        return x + column * self.slot_in[0], y + row * self.slot_in[1]

    def _origin(self, number: int) -> tuple[float, float]:
        line, place = divmod(number, self._on_a_line)
        return (
            place * self._pitch[0] + self._margins[0],
            line * self._pitch[1] + self._margins[1],
        )

    def block_size(self, index: Sequence[int]) -> tuple[float, float]:
        """Return width and height of the block in its slot, which grow with its number of cells."""
        sizes = [1.0, 1.0, *(self._share(d, index[d]) for d in self.dims)][-2:]
        return sizes[1] * self.whole_in[0], sizes[0] * self.whole_in[1]

    def _share(self, dim: int, i: int) -> float:
        blocks = self.cut.dims[dim]
        largest = max(blocks.length(j) for j in range(blocks.parts))
        if not blocks.length(i):
            return 0.0
        return LEAST_FILLED + (1 - LEAST_FILLED) * blocks.length(i) / largest

    def paint_ranges(self, axes: Axes) -> None:
        """Write each table's ranges of cells beside and above it."""
        if len(self.dims) == 1:
            return
        for number in range(self._slices):
            x, y = self._origin(number)
            for row in range(self._table[0]):
                at = (x - 0.37, y + (row + FILLED / 2) * self.slot_in[1])
                label(axes, at, (0.66, 0.45), range_text(self.blocks[-2], row))
            for column in range(self._table[1]):
                at = (x + (column + FILLED / 2) * self.slot_in[0], y - 0.16)
                room = (self.slot_in[0] * 0.9, 0.3)
                label(axes, at, room, range_text(self.blocks[-1], column))
            if len(self.dims) == 3:
                width = self._table[1] * self.slot_in[0]
                text = f"dim {self.dims[0]}: {range_text(self.blocks[0], number)}"
                label(axes, (x + width / 2, y - 0.45), (width + 0.6, 0.21), text, weight="bold")


def range_text(blocks: Blocks, i: int) -> str:
    """Format the cells of a block, such as 0:16; long texts are broken into two lines."""
    start, stop = blocks.block(i)
    text = f"{start}:{stop}"
    return text if len(text) <= 9 else f"{start}:\n{stop}"


def owners_panel(
    cut: Decomposition,
    dims: tuple[int, ...],
    ranks: Sequence[int],
    names: Sequence[int],
    title: str,
) -> Panel:
    """Return a panel of the owners of blocks; ``ranks`` are in row-major order on the grid."""
    grid_map = GridMap(cut, dims)

    def paint(axes: Axes) -> None:
        grid_map.paint_ranges(axes)
        for place, rank in enumerate(ranks):
            index = index_of(place, cut.grid)
            text = str(names[rank])
            if len(dims) == 1:
                text += "\n" + range_text(cut.dims[dims[0]], index[dims[0]])
            size = grid_map.block_size(index)
            _paint_slot(axes, grid_map, index, size, color_at(index), text)

    return Panel(f"{title}: rank, and the cells of its block", *grid_map.size_in, paint)


def messages_panel(
    cut: Decomposition,
    dims: tuple[int, ...],
    ranks: Sequence[int],
    names: Sequence[int],
    rank: int,
    stage: Stage,
    title: str,
) -> Panel:
    """Return a panel of the cells that ``rank`` exchanges with each peer in a stage."""
    grid_map = GridMap(cut, dims)
    received = {message.peer: message.volume for message in stage.receives}
    sent = {message.peer: message.volume for message in stage.sends}
    kept = sum(move.destination.volume for move in stage.moves)

    def paint(axes: Axes) -> None:
        grid_map.paint_ranges(axes)
        for place, peer in enumerate(ranks):
            index = index_of(place, cut.grid)
            if peer == rank:
                text, color = f"{names[peer]}\nkeeps\n{short(kept)}", color_at(index)
            elif peer in received or peer in sent:
                text = _exchange_text(names[peer], received.get(peer, 0), sent.get(peer, 0))
                color = color_at(index)
            else:
                text, color = str(names[peer]), "white"
            wide = 1.8 if peer == rank else 0.6
            _paint_slot(axes, grid_map, index, grid_map.whole_in, color, text, wide)

    return Panel(title, *grid_map.size_in, paint)


def _exchange_text(name: int, received: int, sent: int) -> str:
    lines = [str(name)]
    lines += [f"in {short(received)}"] if received else []
    lines += [f"out {short(sent)}"] if sent else []
    return "\n".join(lines)


def _paint_slot(
    axes: Axes,
    grid_map: GridMap,
    index: Sequence[int],
    size: tuple[float, float],
    color: str,
    text: str,
    linewidth: float = 0.6,
) -> None:
    corner = grid_map.corner(index)
    # An empty block is a dashed slot.
    if 0 in size:
        size = grid_map.whole_in
        box(axes, corner, size, facecolor="none", linestyle="--", edgecolor="0.6")
    else:
        box(axes, corner, size, facecolor=color, linewidth=linewidth)
    label(axes, (corner[0] + size[0] / 2, corner[1] + size[1] / 2), size, text)
