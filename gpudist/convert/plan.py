"""What a conversion does, layer by layer: a table to read, to edit and to pass back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gpudist.errors import ConversionError

Shape = tuple[int, ...]
_TITLES = ("path", "layer", "in", "out", "repartition")


@dataclass
class Row:
    """One layer, or one function that a forward calls.

    Attributes:
        path: of the module in the tree; a function's is its name behind that of its module.
        layer: name of what is converted, and of what it becomes.
        source, target: shapes of the partitions of input and output.
        repartition: shape of the partition to which the input is moved first; may be edited. Its
            workers are the first ones of the input's.
    """

    path: str
    layer: str
    source: Shape
    target: Shape
    repartition: Shape | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as it is printed."""
        shapes = (self.source, self.target, self.repartition)
        return (self.path, self.layer, *("" if s is None else str(list(s)) for s in shapes))


@dataclass
class Plan:
    """The rows of a conversion in the order of the forward; prints as a table, also by rich.

    Attributes:
        rows: one per layer or converted function.
        trusted: paths of modules whose forward is right on blocks, of shapes as given, without
            being looked at. Their children are converted for the partition of their input.
    """

    rows: list[Row] = field(default_factory=list[Row])
    trusted: set[str] = field(default_factory=set[str])

    def __getitem__(self, path: str) -> Row:
        for row in self.rows:
            if row.path == path:
                return row
        paths = [row.path for row in self.rows]
        raise ConversionError(f"the plan has no row {path!r}, only {paths}")

    def repartition_of(self, path: str) -> Shape | None:
        """The partition chosen for the input of a row; ``None`` leaves the choice."""
        found = [row.repartition for row in self.rows if row.path == path]
        return found[0] if found else None

    def __str__(self) -> str:
        return _table([_TITLES, *(row.cells for row in self.rows)])

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*_TITLES)
        for row in self.rows:
            table.add_row(*row.cells)
        return table


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)
