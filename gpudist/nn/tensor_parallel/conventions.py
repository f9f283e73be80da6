"""Refusal of values whose gradients follow another convention than an operator takes."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.errors import ConventionError
from gpudist.exchange.autograd import is_eager
from gpudist.nn.parameters.gradient_graph import (
    NODE_LIMIT,
    Border,
    Convention,
    Node,
    border_of,
    ends_search,
    inputs_of,
    mark,
    outline,
)
from gpudist.ops.agreement import refuse
from gpudist.world.partition import Partition

_REMEMBERED_OUTLINES = 64
# So short a way to the nearest operators is followed at every call: microseconds, and certain.
_FOLLOWED_NODES = 64


class Expectation:
    """The convention of values that an operator takes, checked in the graph that made them.

    The graph is followed from a value to the nearest operators that declare a convention: at every
    call where they are near, else once for each structure, told apart by its last nodes. Not under
    torch.compile, in forward mode nor in transforms of torch.func, where there is no such graph.

    Args:
        name: of the layer or the operator.
        convention: that it takes.
        nodes: of the graph, by which structures are told apart: those of the operator, and more.
    """

    def __init__(self, name: str, convention: Convention, nodes: int = 8) -> None:
        self._name, self._nodes = name, nodes
        self._convention: Convention = convention
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, x: torch.Tensor, P: Partition) -> None:
        """Check a value of which the workers of ``P`` hold copies, or parts.

        Raises:
            ConventionError: it was made by the other convention.
        """
        if not is_eager() or x.grad_fn is None or P.size == 1:
            return
        key = (*outline(x.grad_fn, self._nodes), P.ranks)
        if key in self._seen:
            return
        found, visited = nearest_of_other(x.grad_fn, frozenset(P.ranks), self._convention)
        if found is not None:
            refuse(P, ConventionError(self._text(found)))
        if visited <= _FOLLOWED_NODES:
            return
        if len(self._seen) == _REMEMBERED_OUTLINES:
            self._seen.clear()
        self._seen.add(key)

    def _text(self, found: Border) -> str:
        if self._convention == "dual":
            return (
                f"{self._name} takes parts, or copies whose gradients add up (convention 'dual'), "
                f"but its input comes from {found.name}, whose output has the whole gradient on "
                f"each of {len(found.ranks)} workers (convention 'invariant'): gradients would be "
                "too small, or parts of them missing. Pass it through gpudist.nn.invariant_copy "
                "or invariant_scatter, use an operator of the invariant convention (a loss of "
                "torch, of the whole output), or make all layers with convention='dual'"
            )
        return (
            f"{self._name} takes a value that has the whole gradient on each worker (convention "
            f"'invariant'), but its input comes from {found.name}, whose output is a part, or a "
            f"copy whose gradients add up over {len(found.ranks)} workers (convention 'dual'): "
            "gradients would be counted several times. Pass copies through "
            "gpudist.nn.invariant_share, parts through invariant_sum or invariant_gather, or make "
            "all layers with one convention"
        )


def nearest_of_other(
    start: Node, ranks: frozenset[int], convention: Convention
) -> tuple[Border | None, int]:
    """The operator of the other convention from which a value comes without a border between.

    And how many nodes were visited to find it, or that there is none.

    Visits every node once, and at most ``NODE_LIMIT``.

    Args:
        start: the node that made the value.
        ranks: of the workers that the value is taken on.
        convention: that it is taken by.
    """
    pending, seen = [start], {start}
    while pending and len(seen) < NODE_LIMIT:
        node = pending.pop()
        border = border_of(node)
        if border is not None and border.concerns(ranks):
            if border.gives != convention:
                return border, len(seen)
            if border.takes != border.gives:
                continue
        if ends_search(node):
            continue
        for source, _ in inputs_of(node):
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return None, len(seen)


def expect(name: str, convention: Convention, x: torch.Tensor, P: Partition) -> None:
    """The check of an operator that is a function; see :class:`Expectation`."""
    if not is_eager() or x.grad_fn is None:
        return
    kept: dict[Any, Any] = P.wire.remembered
    key = Expectation, name
    if key not in kept:
        kept[key] = Expectation(name, convention)
    kept[key](x, P)


def marked(y: torch.Tensor, name: str, P: Partition) -> torch.Tensor:
    """``y``, which an operator has just made, with its name and workers on the graph's node."""
    return mark(y, name, P) if is_eager() else y
