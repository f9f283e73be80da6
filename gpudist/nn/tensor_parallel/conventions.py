"""Check that gradients follow the convention that an operator expects."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.cache import Cache
from gpudist.errors import ConventionError
from gpudist.exchange.autograd import is_eager
from gpudist.nn.parameters.gradient_graph import (
    FOLLOWED_NODES,
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
from gpudist.ops.shape_agreement import refuse
from gpudist.world.partition import Partition


class Expectation:
    """Check of the gradient convention that an operator expects, in the graph of its input.

    The check searches the graph from the value to the nearest operators that declare a convention:
    at every call if they are near, otherwise once for each structure, identified by its last nodes.
    Under torch.compile, in forward mode and in transforms of torch.func there is no such graph, and
    nothing is checked.

    Args:
        name: name of the layer or operator.
        convention: convention that it expects.
        nodes: number of last nodes of the graph that identify a structure; more than the operator
            itself has.
    """

    def __init__(self, name: str, convention: Convention, nodes: int = 8) -> None:
        self._name, self._nodes = name, nodes
        self._convention: Convention = convention
        self._seen = Cache[tuple[object, ...], bool](64)

    def __call__(self, x: torch.Tensor, P: Partition) -> None:
        """Check a value whose copies or parts the workers of ``P`` hold.

        Raises:
            ConventionError: the value comes from an operator of the other convention.
        """
        if not is_eager() or x.grad_fn is None or P.size == 1:
            return
        key = (*outline(x.grad_fn, self._nodes), P.ranks)
        if key in self._seen:
            return
        border, visited = nearest_of_other(x.grad_fn, frozenset(P.ranks), self._convention)
        if border is not None:
            refuse(P, ConventionError(self._text(border)))
        if visited <= FOLLOWED_NODES:
            return
        self._seen[key] = True

    def _text(self, border: Border) -> str:
        if self._convention == "dual":
            return (
                f"{self._name} expects parts, or copies whose gradients add up (convention "
                f"'dual'), but its input comes from {border.name}, whose output has the whole "
                f"gradient on each of {len(border.ranks)} workers (convention 'invariant'): "
                "gradients would be too small or incomplete. Pass it through "
                "gpudist.nn.invariant_copy or invariant_scatter, use an operator of the invariant "
                "convention (a loss of torch, of the whole output), or make all layers with "
                "convention='dual'"
            )
        return (
            f"{self._name} expects a value that has the whole gradient on each worker (convention "
            f"'invariant'), but its input comes from {border.name}, whose output is a part, or a "
            f"copy whose gradients add up over {len(border.ranks)} workers (convention 'dual'): "
            "gradients would be counted several times. Pass copies through "
            "gpudist.nn.invariant_share, parts through invariant_sum or invariant_gather, or make "
            "all layers with one convention"
        )


def nearest_of_other(
    start: Node, ranks: frozenset[int], convention: Convention
) -> tuple[Border | None, int]:
    """Return the nearest operator of the other convention, and the number of visited nodes.

    The operator is ``None`` if every path reaches another border first. The search visits each node
    once, and at most ``NODE_LIMIT`` nodes.

    Args:
        start: node that computed the value.
        ranks: world ranks of the workers that use the value.
        convention: convention by which they use it.
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
    """Check the convention of ``x`` for an operator function; see :class:`Expectation`."""
    if not is_eager() or x.grad_fn is None:
        return
    kept: dict[Any, Any] = P.wire.remembered
    key = Expectation, name
    if key not in kept:
        kept[key] = Expectation(name, convention)
    kept[key](x, P)


def mark_result(y: torch.Tensor, name: str, P: Partition) -> torch.Tensor:
    """Return ``y``, a new result, with the operator's name and workers on its graph node."""
    return mark(y, name, P) if is_eager() else y
