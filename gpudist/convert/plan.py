"""What a conversion does, layer by layer: a table to read, to edit and to pass back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpudist.arguments import Checked, checked
from gpudist.errors import ConversionError

Shape = tuple[int, ...]
_TITLES = ("path", "layer", "in", "out", "repartition", "weight")


@dataclass
class Row:
    """One layer, one function that a forward calls, or a tensor that is moved before a module.

    Attributes:
        path: of the module in the tree; a function's is its name behind that of its module.
        layer: name of what is converted, and of what it becomes.
        source, target: shapes of the partitions of input and output.
        repartition: shape of the partition to which the input is moved first; may be edited. Its
            workers are the first ones of the network's.
        weight: of a linear layer, the shape of the grid that cuts its weight, ``[*leading, rows,
            columns]``; may be edited. The input is moved to ``[*leading, columns]`` where it is
            not there, and the output is on ``[*leading, rows]``.
    """

    path: str
    layer: str
    source: Shape
    target: Shape
    repartition: Shape | None = None
    weight: Shape | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as it is printed."""
        shapes = (self.source, self.target, self.repartition, self.weight)
        return (self.path, self.layer, *("" if s is None else str(list(s)) for s in shapes))


@dataclass
class Plan(Checked):
    """The rows of a conversion in the order of the forward; prints as a table, also by rich.

    Attributes:
        rows: one per layer or converted function, and one per module before which a tensor is
            moved.
        trusted: paths of modules whose forward is right on blocks, of shapes as given, without
            being looked at. Their children are converted for the partition of their input.
    """

    rows: list[Row] = field(default_factory=list[Row])
    trusted: set[str] = field(default_factory=set[str])

    def __getitem__(self, path: str) -> Row:
        row = self.find(path)
        if row is None:
            paths = [row.path for row in self.rows]
            raise ConversionError(f"the plan has no row {path!r}, only {paths}")
        return row

    @checked(ConversionError)
    def find(self, path: str) -> Row | None:
        """The row of a path, if there is one."""
        return next((row for row in self.rows if row.path == path), None)

    @checked(ConversionError)
    def repartition(self, path: str, shape: Sequence[int]) -> None:
        """Move the first argument of a module, or of a converted function, before it is called.

        Args:
            path: of any module that a forward calls, also of one that is no layer.
            shape: of the partition, of the first workers of the network's; one axis per dim. What
                follows is on that partition, up to another repartition.
        """
        row = self.find(path)
        if row is None:
            self.rows.append(Row(path, "Repartition", (), (), tuple(shape)))
        else:
            row.repartition = tuple(shape)

    @checked(ConversionError)
    def split_weight(self, path: str, shape: Sequence[int]) -> None:
        """Cut the weight of a linear layer.

        Args:
            path: of the layer.
            shape: ``[*leading, rows, columns]``: over how many workers each leading dim of the
                input, the output features and the input features are split.
        """
        row = self.find(path)
        if row is None:
            self.rows.append(Row(path, "Linear", (), (), weight=tuple(shape)))
        else:
            row.weight = tuple(shape)

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
