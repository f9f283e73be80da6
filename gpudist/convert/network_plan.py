"""The plan of a converted network: the functions it computes, and edits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from gpudist.checks.arguments import Checked, checked
from gpudist.checks.columns import columns
from gpudist.errors import ConversionError
from gpudist.sbp.scope import PlanRow

Shape = tuple[int, ...]
_TITLES = ("path", "function", "in", "out", "sent", "")


# Patterns of the attributes of one axis, and of a tensor, in their printed form.
_ONE = re.compile(r"split\((\d+)[^)]*\)|broadcast|partial_sum")
_TENSOR = re.compile(r"\((?:[^()]|\([^()]*\))*\)")
_SHORT = {"broadcast": "copy", "partial_sum": "sum"}


def _short(layouts: str) -> str:
    """Abbreviate layouts as split dims, ``copy`` and ``sum``, without repetitions.

    Copies, such as parameters, are omitted if there are other layouts.
    """

    def of(tensor: re.Match[str]) -> str:
        axes = [_SHORT.get(one[0], one[1]) for one in _ONE.finditer(tensor[0])]
        return axes[0] if len(set(axes)) == 1 and axes[0] in _SHORT.values() else ",".join(axes)

    found = list(dict.fromkeys(_TENSOR.sub(of, layouts).replace(" as ", "->").split(", ")))
    return " ".join([one for one in found if one != "copy"] or found)


def cells_of(row: PlanRow) -> tuple[str, ...]:
    sent = f"{row.sent_bytes:,}" if row.sent_bytes else ""
    notes = "gathered" if row.is_gathered else "everywhere" if row.is_redundant else ""
    name = row.function.rpartition(".")[2]
    return (row.path, name, _short(row.inputs), _short(row.outputs), sent, notes)


@dataclass
class NetworkPlan(Checked):
    """The functions that a converted network calls, in order; printed as a table, also by rich.

    The table shows each tensor by its attributes along the axes with more than one worker: the
    number of the split dim, ``copy``, or ``sum`` for terms; ``2,3->copy`` marks a tensor that is
    moved. ``gathered`` marks functions without a rule, and ``everywhere`` functions whose full
    result is computed by every worker.

    Attributes:
        rows: one row per function called on global tensors.
        repartitions: grid to which the first argument of a module is moved, by the module's path.
        weights: grid that splits the weight of a linear layer, by the layer's path.
        outputs: specs of the outputs, nested like them.
    """

    rows: list[PlanRow] = field(default_factory=list[PlanRow])
    repartitions: dict[str, Shape] = field(default_factory=dict[str, Shape])
    weights: dict[str, Shape] = field(default_factory=dict[str, Shape])
    outputs: Any = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that the planned ranks send in a forward."""
        return sum(row.sent_bytes for row in self.rows)

    @property
    def redundant_cells(self) -> int:
        """Number of cells of the results that every worker computes."""
        return sum(row.cells for row in self.rows if row.is_redundant)

    @checked(ConversionError)
    def of(self, path: str) -> list[PlanRow]:
        """Return the rows of the module at ``path`` and of its submodules."""
        return [row for row in self.rows if f"{row.path}.".startswith(f"{path}." if path else "")]

    @checked(ConversionError)
    def repartition(self, path: str, shape: Sequence[int]) -> None:
        """Repartition the first argument of a module before each call.

        Args:
            path: path of the module.
            shape: number of workers that split each dim of the argument, one axis per dim; the
                first workers of the network's partition are used.
        """
        self.repartitions[path] = tuple(shape)

    @checked(ConversionError)
    def split_weight(self, path: str, shape: Sequence[int]) -> None:
        """Split the weight of a linear layer, so that each worker holds one block of it.

        Args:
            path: path of the layer.
            shape: ``[*leading, rows, columns]``: number of workers that split each leading dim of
                the input, the output features and the input features.
        """
        self.weights[path] = tuple(shape)

    def __str__(self) -> str:
        return columns([_TITLES, *map(cells_of, self.rows)], left=len(_TITLES))

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*_TITLES)
        for row in self.rows:
            table.add_row(*cells_of(row))
        return table


def workers_of(path: str, shape: Shape, most: int) -> int:
    """Return the number of workers of a grid; raise if there are more than ``most``.

    Raises:
        ConversionError: the grid has more workers than the network, or an empty axis.
    """
    if prod(shape) > most or min(shape, default=1) < 1:
        raise ConversionError(
            f"{path}: a grid of shape {list(shape)} needs {prod(shape)} workers, but the network "
            f"has {most}; use at most {most} workers, and at least 1 along every axis"
        )
    return prod(shape)
