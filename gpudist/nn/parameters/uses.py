"""Conventions by which plain modules use their parameters, found in the graph of a forward.

Plain torch functions preserve the convention, so all nodes between borders, where a layer declares
a convention, have the same one. A parameter used with invariant values there has the full gradient
on every worker. If it is used with blocks, or with copies whose gradients add up, it has a part of
the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from gpudist.errors import ConventionError
from gpudist.nn.parameters.gradient_graph import (
    Border,
    Convention,
    Node,
    border_of,
    ends_search,
    inputs_of,
    is_opaque,
)

Ranks = frozenset[int]


class _DeclaredConvention(NamedTuple):
    """Convention of a part of the graph, and the layer that declares it."""

    convention: Convention
    name: str


class UsedParameters:
    """Graph of one forward, from its outputs to the parameters that one node copied.

    Args:
        outputs: return value of the forward.
        copies_node: node whose outputs are the parameters.

    Attributes:
        borders: all operators in the graph that declare a convention.
        hides_recomputation: whether a part is recomputed in backward, where parameters are not
            copied.
    """

    def __init__(self, outputs: object, copies_node: Node) -> None:
        self._nodes: dict[Node, int] = {}
        self._edges: list[tuple[int, int]] = []
        self._uses: list[tuple[int, int]] = []
        self._borders: dict[int, Border] = {}
        self._opaque: set[int] = set()
        self.hides_recomputation = False
        self._follow([y.grad_fn for y in tensors_of(outputs)], copies_node)

    @property
    def structure(self) -> tuple[object, ...]:
        """Key that is equal for equal graphs that use parameters at equal places."""
        borders = [(i, b.name, b.takes, b.gives, b.ranks) for i, b in self._borders.items()]
        return tuple(self._edges), tuple(self._uses), tuple(borders), frozenset(self._opaque)

    @property
    def borders(self) -> list[Border]:
        return list(self._borders.values())

    def _follow(self, pending: list[Node], copies_node: Node) -> None:
        for node in pending:
            self._nodes.setdefault(node, len(self._nodes))
        while pending:
            node = pending.pop()
            here = self._nodes[node]
            border = border_of(node)
            if border is not None:
                self._borders[here] = border
            if is_opaque(node):
                self._opaque.add(here)
                self.hides_recomputation |= type(node).__name__.startswith("Checkpoint")
            elif ends_search(node):
                continue
            for source, number in inputs_of(node):
                if source is copies_node:
                    self._uses.append((number, here))
                    continue
                if source not in self._nodes:
                    self._nodes[source] = len(self._nodes)
                    pending.append(source)
                self._edges.append((here, self._nodes[source]))

    def conventions(self, line: Ranks) -> dict[int, set[Convention | None]]:
        """Return, for each output of the copying node, the conventions of its uses on ``line``.

        ``None`` stands for a use whose convention the graph does not show.

        Raises:
            ConventionError: values of both conventions meet.
        """
        # Vertex 2 i is the output side of node i, and vertex 2 i + 1 its input side.
        parents = list(range(2 * len(self._nodes)))

        def root(vertex: int) -> int:
            while parents[vertex] != vertex:
                parents[vertex] = parents[parents[vertex]]
                vertex = parents[vertex]
            return vertex

        borders = {i: b for i, b in self._borders.items() if b.concerns(line)}
        for i in range(len(self._nodes)):
            if i not in borders and i not in self._opaque:
                parents[root(2 * i)] = root(2 * i + 1)
        for user, source in self._edges:
            if source not in self._opaque:
                parents[root(2 * user + 1)] = root(2 * source)
        declared: dict[int, _DeclaredConvention] = {}
        for i, border in borders.items():
            sides = (
                _DeclaredConvention(border.gives, border.name),
                _DeclaredConvention(border.takes, border.name),
            )
            for vertex, declaration in zip((2 * i, 2 * i + 1), sides, strict=True):
                other = declared.setdefault(root(vertex), declaration)
                if other.convention != declaration.convention:
                    raise ConventionError(_text_of_both(declaration, other, len(line)))
        uses: dict[int, set[Convention | None]] = {}
        for number, user in self._uses:
            declaration_of_user = declared.get(root(2 * user + 1))
            uses.setdefault(number, set()).add(
                declaration_of_user.convention if declaration_of_user else None
            )
        return uses


def _text_of_both(first: _DeclaredConvention, other: _DeclaredConvention, workers: int) -> str:
    dual, invariant = (first, other) if first.convention == "dual" else (other, first)
    return (
        f"fuse_parameter_movements: values of {dual.name}, whose gradients add up over {workers} "
        f"workers (convention 'dual'), meet values of {invariant.name}, which have the whole "
        "gradient on each worker (convention 'invariant'); pass the former through "
        "gpudist.nn.invariant_share or the latter through invariant_copy, or make all layers with "
        "one convention"
    )


def tensors_of(outputs: object) -> list[torch.Tensor]:
    """Return the outputs of a forward that are tensors with a graph."""
    leaves = tree_leaves(outputs)
    return [y for y in leaves if isinstance(y, torch.Tensor) and y.grad_fn is not None]
