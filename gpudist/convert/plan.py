"""What a converted network does, function by function, found without a world; and its edits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from gpudist.checks.arguments import Checked, checked
from gpudist.errors import ConversionError
from gpudist.sbp.scope import Row

Shape = tuple[int, ...]
_TITLES = ("path", "function", "in", "out", "sent", "")


# Attributes of one axis, and those of a tensor, as they are written.
_ONE = re.compile(r"split\((\d+)[^)]*\)|broadcast|partial_sum")
_TENSOR = re.compile(r"\((?:[^()]|\([^()]*\))*\)")
_SHORT = {"broadcast": "copy", "partial_sum": "sum"}


def _short(layouts: str) -> str:
    """Layouts in few letters, each once: the dims that are split, ``copy`` and ``sum``.

    Copies, as of parameters, are left out beside others.
    """

    def of(tensor: re.Match[str]) -> str:
        axes = [_SHORT.get(one[0], one[1]) for one in _ONE.finditer(tensor[0])]
        return axes[0] if len(set(axes)) == 1 and axes[0] in _SHORT.values() else ",".join(axes)

    found = list(dict.fromkeys(_TENSOR.sub(of, layouts).replace(" as ", "->").split(", ")))
    return " ".join([one for one in found if one != "copy"] or found)


def cells_of(row: Row) -> tuple[str, ...]:
    """A row as it is printed."""
    sent = f"{row.sent_bytes:,}" if row.sent_bytes else ""
    notes = "gathered" if row.is_gathered else "everywhere" if row.is_redundant else ""
    name = row.function.rpartition(".")[2]
    return (row.path, name, _short(row.inputs), _short(row.outputs), sent, notes)


@dataclass
class Plan(Checked):
    """The functions that a converted network calls, in order; prints as a table, also by rich.

    In the table tensors are told by what splits them along each axis of several workers: the number
    of a dim, ``copy``, or ``sum`` for terms; ``2,3->copy`` was moved. ``gathered`` marks functions
    without a rule, and ``everywhere`` those of which every worker computes the whole result.

    Attributes:
        rows: one for each function that is carried out on global tensors.
        repartitions: the grid to which the first argument of a module is moved, by its path.
        weights: the grid that cuts the weight of a linear layer, by its path.
        outputs: how the outputs lie, as they are nested.
    """

    rows: list[Row] = field(default_factory=list[Row])
    repartitions: dict[str, Shape] = field(default_factory=dict[str, Shape])
    weights: dict[str, Shape] = field(default_factory=dict[str, Shape])
    outputs: Any = None

    @property
    def sent_bytes(self) -> int:
        """That the planned rank sends in a forward."""
        return sum(row.sent_bytes for row in self.rows)

    @property
    def redundant_cells(self) -> int:
        """Of the results that every worker computes."""
        return sum(row.cells for row in self.rows if row.is_redundant)

    @checked(ConversionError)
    def of(self, path: str) -> list[Row]:
        """The rows of a module and of what is in it."""
        return [row for row in self.rows if f"{row.path}.".startswith(f"{path}." if path else "")]

    @checked(ConversionError)
    def repartition(self, path: str, shape: Sequence[int]) -> None:
        """Move the first argument of a module before it is called.

        Args:
            path: of the module.
            shape: one axis for each dim of the argument: over how many workers, the first ones of
                the network's, it is split.
        """
        self.repartitions[path] = tuple(shape)

    @checked(ConversionError)
    def split_weight(self, path: str, shape: Sequence[int]) -> None:
        """Cut the weight of a linear layer, of which each worker then holds a block.

        Args:
            path: of the layer.
            shape: ``[*leading, rows, columns]``: over how many workers each leading dim of the
                input, the output features and the input features are split.
        """
        self.weights[path] = tuple(shape)

    def __str__(self) -> str:
        return _table([_TITLES, *map(cells_of, self.rows)])

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*_TITLES)
        for row in self.rows:
            table.add_row(*cells_of(row))
        return table


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)


def workers_of(path: str, shape: Shape, most: int) -> int:
    """How many workers a grid has.

    Raises:
        ConversionError: more than there are.
    """
    if prod(shape) > most or min(shape, default=1) < 1:
        raise ConversionError(
            f"{path}: a grid of shape {list(shape)} takes {prod(shape)} workers, but the network "
            f"has {most}"
        )
    return prod(shape)
