"""The plan of a converted network: the functions it computes, and edits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

from gpudist.checks.arguments import Checked, checked
from gpudist.checks.columns import columns
from gpudist.errors import ConversionError
from gpudist.geometry.layout import NdSbp, Sbp, split
from gpudist.sbp.pins import Pin
from gpudist.sbp.scope import PlanRow

Shape = tuple[int, ...]
# Key of the version in a plan's text.
_KIND = "gpudist plan"
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
        axes = [_SHORT.get(layout[0], layout[1]) for layout in _ONE.finditer(tensor[0])]
        return axes[0] if len(set(axes)) == 1 and axes[0] in _SHORT.values() else ",".join(axes)

    texts = list(dict.fromkeys(_TENSOR.sub(of, layouts).replace(" as ", "->").split(", ")))
    return " ".join([layout for layout in texts if layout != "copy"] or texts)


def cells_of(row: PlanRow) -> tuple[str, ...]:
    sent = f"{row.sent_bytes:,}" if row.sent_bytes else ""
    notes = "gathered" if row.is_gathered else "everywhere" if row.is_redundant else ""
    name = row.called or row.function.rpartition(".")[2]
    return (row.path, name, _short(row.inputs), _short(row.outputs), sent, notes)


@dataclass(frozen=True)
class Stretch(Checked):
    """Functions of a forward that compute in one layout, one after the other or connected.

    Attributes:
        first, last: first and last function, each as the path of its module and its name.
        functions: number of functions.
        whole: for each axis of the plan's grid with several workers, by its number, whether all
            workers along it compute the whole; otherwise tensors are split as the input is.
        entering_bytes: bytes that a rank sends, or shares in collectives, to move the tensors that
            enter it from other layouts, forward and backward. What an activation checkpoint
            repeats counts once.
    """

    first: str
    last: str
    functions: int
    whole: dict[int, bool]
    entering_bytes: int


@dataclass
class NetworkPlan(Checked):
    """The functions that a converted network calls, in order; printed as a table, also by rich.

    The table shows each tensor by its attributes along the axes with more than one worker: the
    number of the split dim, ``copy``, or ``sum`` for terms; ``2,3->copy`` marks a tensor that is
    moved. ``gathered`` marks functions without a rule, and ``everywhere`` functions whose full
    result is computed by every worker. Functions that torch makes of others are named in each of
    their rows, as :meth:`layout` takes them; ``to_global`` is a movement outside of functions.

    Attributes:
        rows: one row per function called on global tensors.
        layouts: prescribed layouts, in the order in which they are applied.
        weights: grid that splits the weight of a layer, by the layer's path.
        recomputed: paths of modules that are recomputed in backward.
        outputs: specs of the outputs, nested like them.
        notes: lines that explain the edits, as :func:`gpudist.planning.search` writes them.
        grid: shape of the partition that it was searched on; ``None`` if it was not searched.
        stretches: layouts of all functions, in the order of the forward, if it was searched.
    """

    rows: list[PlanRow] = field(default_factory=list[PlanRow])
    layouts: list[Pin] = field(default_factory=list[Pin])
    weights: dict[str, Shape] = field(default_factory=dict[str, Shape])
    outputs: Any = None
    notes: list[str] = field(default_factory=list[str])
    grid: Shape | None = None
    recomputed: list[str] = field(default_factory=list[str])
    stretches: list[Stretch] = field(default_factory=list[Stretch])

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
    def layout(
        self,
        path: str,
        sbp: Sbp | Sequence[Sbp],
        *,
        call: int | None = None,
        at: Literal["input", "output"] = "output",
        function: str = "",
        grid: Sequence[int] | None = None,
    ) -> None:
        """Prescribe the layout of what a module, or a function in its forward, takes or returns.

        The first global tensor among the arguments, or in the result, is moved there, and every
        function afterwards keeps its layout where it has a way to. At the input of a function such
        as ``cat`` or ``add``, the other tensors follow, by the function's rule. Copies of a tensor
        that was split cost an all-gather, and their gradients, which are terms, a reduce-scatter;
        while every tensor is a copy, nothing is sent.

        Args:
            path: path of the module; empty for the network itself.
            sbp: one attribute per axis of ``grid``, outer axis first, or ``broadcast`` for all.
            call: number of the call within a forward, from 0; by default every call.
            at: ``"input"`` or ``"output"``.
            function: name of a function that the module's own forward calls, such as ``"cat"`` or
                ``"add"``; the ``function`` column of a printed plan has the names.
            grid: another shape of the grid of all workers, or of the first ones; by default the
                shape of ``P_x``.

        Raises:
            ConversionError: ``grid`` and ``sbp`` have different lengths.
        """
        shape = None if grid is None else tuple(grid)
        attributes: NdSbp = (
            (sbp,) * (len(shape) if shape else 1) if isinstance(sbp, Sbp) else tuple(sbp)
        )
        if shape is not None and len(attributes) != len(shape):
            raise ConversionError(
                f"layout of {path!r}: sbp has {len(attributes)} attributes, but the grid "
                f"{list(shape)} has {len(shape)} axes; give one for each axis"
            )
        self.layouts.append(Pin(path, attributes, at, call, function, shape))

    @checked(ConversionError)
    def repartition(self, path: str, shape: Sequence[int]) -> None:
        """Repartition the first argument of a module before each call.

        Args:
            path: path of the module.
            shape: number of workers that split each dim of the argument, one axis per dim; the
                first workers of the network's partition are used.
        """
        grid = tuple(shape)
        sbp = tuple(split(dim) for dim in range(len(grid)))
        self.layouts.append(Pin(path, sbp, "input", grid=grid, dims=len(grid)))

    @checked(ConversionError)
    def split_weight(self, path: str, shape: Sequence[int]) -> None:
        """Split the weight of a linear layer or a convolution: each worker holds one block of it.

        Its gradient and the optimizer's state are split with it. The input is moved to the layout
        that the layer needs. The output is split over its channels by the rows, and is a sum over
        the columns.

        Args:
            path: path of the layer.
            shape: number of workers that split each dim of the input, with two axes in place of the
                dim of channels: rows, which split output channels, and columns, which split input
                channels. That is ``[*leading, rows, columns]`` for a linear layer and
                ``[batch, rows, columns, *space]`` for a convolution. Rows of a convolution with
                groups split whole groups, and it has 1 column.
        """
        self.weights[path] = tuple(shape)

    @checked(ConversionError)
    def recompute(self, path: str) -> None:
        """Put an activation checkpoint around a module: keep its inputs alone for backward.

        The network itself is not changed; its conversion calls ``torch.utils.checkpoint``.

        Args:
            path: path of the module.
        """
        self.recomputed.append(path)

    def to_text(self) -> str:
        """Return the edits and notes as JSON text, which :meth:`from_text` reads.

        The rows, which follow from a network and the shapes of its inputs, are not part of it.
        """
        layouts = [
            {
                "path": pin.path, "at": pin.at, "call": pin.call, "function": pin.function,
                "grid": pin.grid, "dims": pin.dims, "sbp": [*map(_word_of, pin.sbp)],
            }
            for pin in self.layouts
        ]  # fmt: skip
        edits = {_KIND: 1, "layouts": layouts, "weights": self.weights}
        more = {
            "notes": self.notes, "grid": self.grid, "recomputed": self.recomputed,
            "stretches": [
                vars(stretch) | {"whole": list(stretch.whole.items())} for stretch in self.stretches
            ],
        }  # fmt: skip
        return json.dumps(edits | {key: value for key, value in more.items() if value}, indent=1)

    @classmethod
    def from_text(cls, text: str) -> NetworkPlan:
        """Return the plan that :meth:`to_text` has written.

        Args:
            text: the text.

        Returns:
            Plan without rows.

        Raises:
            ConversionError: the text is not a plan, or of a later version.
        """
        try:
            facts = json.loads(text)
            if facts[_KIND] != 1:
                raise ConversionError(
                    f"plan: the text is of version {facts[_KIND]!r}, and this release reads 1; "
                    "update gpudist"
                )
            plan = cls()
            for path, shape in facts["weights"].items():
                plan.split_weight(path, shape)
            plan.notes += map(str, facts.get("notes", ()))
            plan.recomputed += map(str, facts.get("recomputed", ()))
            plan.grid = tuple(map(int, facts.get("grid", ()))) or None
            for row in facts.get("stretches", ()):
                whole = {int(axis): bool(is_whole) for axis, is_whole in row["whole"]}
                plan.stretches.append(Stretch(**(row | {"whole": whole})))
            for row in facts["layouts"]:
                row["sbp"] = tuple(_sbp_of(word) for word in row["sbp"])
                row["grid"] = None if row["grid"] is None else tuple(row["grid"])
                plan.layouts.append(Pin(**row))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConversionError(
                f"plan: this text is not a plan ({type(error).__name__}: {error}); write it with "
                "plan.save(file) or plan.to_text()"
            ) from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write the edits to a file of JSON text.

        Args:
            path: the file.
        """
        Path(path).write_text(f"{self.to_text()}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> NetworkPlan:
        """Return the plan of a file that :meth:`save` has written.

        Args:
            path: the file.

        Returns:
            Plan without rows.

        Raises:
            ConversionError: the file is missing, or holds no plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConversionError(f"plan: {path} cannot be read: {error}") from error
        return cls.from_text(text)

    def __str__(self) -> str:
        edits = [f"layout of {pin}" for pin in self.layouts]
        if self.recomputed:
            edits.append(f"recomputed in backward: {', '.join(self.recomputed)}")
        edits += [f"weight of {path}: on {list(shape)}" for path, shape in self.weights.items()]
        if not self.rows and (edits or self.notes):
            return "\n".join([*self.notes, *edits])
        return columns([_TITLES, *map(cells_of, self.rows)], left=len(_TITLES))

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*_TITLES)
        for row in self.rows:
            table.add_row(*cells_of(row))
        return table


def _word_of(attribute: Sbp) -> Any:
    if not attribute.is_split:
        return attribute.kind
    return {"split": attribute.dim} | (
        {} if attribute.sizes is None else {"sizes": attribute.sizes}
    )


def _sbp_of(word: Any) -> Sbp:
    return split(word["split"], word.get("sizes")) if isinstance(word, dict) else Sbp(word)


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
