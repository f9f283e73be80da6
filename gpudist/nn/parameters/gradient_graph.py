"""The autograd graph of a tensor, and the places where the gradient convention changes.

A value that is the same on several workers has a gradient on each of them. In the *dual*
convention, these add up to the gradient; in the *invariant* convention, each is the full gradient.
An operator that declares a convention is a *border*: its autograd function, or the map that this
function applies (:class:`~gpudist.exchange.autograd.Declared`), has the attributes ``takes`` and
``gives``, the conventions of its input and of its output. Plain torch functions preserve the
convention.

This module relies on ``next_functions``, ``_forward_cls`` and ``_sequence_nr`` of torch's nodes,
and on the names of opaque nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from gpudist.world.partition import Partition

Convention = Literal["dual", "invariant"]
Node = Any

# Maximum number of visited nodes. The graph of a training step has thousands.
NODE_LIMIT = 100_000
# A graph of up to this many nodes is searched at every call, which takes microseconds.
FOLLOWED_NODES = 64
# Nodes that stand for a part of the graph that is built elsewhere, or in backward.
_OPAQUE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")
_OPAQUE_PREFIX = "GeneratedBackwardFor_gpudist"

Made = tuple[str, str, int]
_recorded = threading.local()


class Border(NamedTuple):
    """Operator that declares a convention.

    Attributes:
        name: name of the layer or operator.
        takes, gives: conventions of its input and its output.
        ranks: world ranks of the workers that take part.
    """

    name: str
    takes: Convention
    gives: Convention
    ranks: frozenset[int]

    def concerns(self, ranks: frozenset[int]) -> bool:
        """Return whether at least two of ``ranks`` take part in the operator."""
        return len(self.ranks & ranks) > 1


def mark(y: torch.Tensor, name: str, P: Partition) -> torch.Tensor:
    """Set the layer's name and workers on the node that computed ``y``, and record the node."""
    node: Node = y.grad_fn
    if node is not None:
        node.made_by, node.made_on = name, P
        for made in getattr(_recorded, "lists", ()):
            made.append((name, type(node).__name__, node._sequence_nr()))
    return y


def begin_record() -> None:
    """Record the operators of this thread that declare a convention, until ``end_record``."""
    if not hasattr(_recorded, "lists"):
        _recorded.lists = []
    _recorded.lists.append([])


def end_record() -> list[Made]:
    """Return the recorded operators: name, node type and sequence number."""
    return _recorded.lists.pop()


def border_of(node: Node) -> Border | None:
    """Return the border that a node declares, ``None`` if it declares no convention."""
    function = getattr(node, "declared", None) or getattr(node, "_forward_cls", None)
    takes = getattr(function, "takes", None)
    if function is not None and takes is not None:
        name, gives, movements = function.name, function.gives, ()
    else:
        # A movement is linear, and its backward is its adjoint.
        movements = getattr(node, "movements", ())
        if not movements:
            return None
        name, takes, gives = movements[0].label, "dual", "dual"
    P = getattr(node, "made_on", None) or getattr(function, "P", None)
    ranks = frozenset(P.ranks) if P is not None else _ranks_of(movements)
    return Border(getattr(node, "made_by", name), takes, gives, ranks)


def _ranks_of(movements: Iterable[Any]) -> frozenset[int]:
    """Return the world ranks with which this one exchanges messages, including its own."""
    members: set[int] = set()
    for step in (step for movement in movements for step in movement.steps):
        stage, ranks = step.stage, step.partition.ranks
        peers = {message.peer for message in (*stage.sends, *stage.receives)}
        peers |= {rank for group in stage.collectives for rank in group.members}
        members |= {ranks[peer] for peer in peers}
        members.add(ranks[step.partition.rank])
    return frozenset(members)


def is_opaque(node: Node) -> bool:
    """Return whether the graph does not show the computation within the node."""
    name = type(node).__name__
    return name in _OPAQUE or name.startswith(_OPAQUE_PREFIX)


def ends_search(node: Node) -> bool:
    """Return whether only parameters, or values with their own convention, precede the node."""
    return getattr(getattr(node, "_forward_cls", None), "ends_search", False) or is_opaque(node)


def inputs_of(node: Node) -> Iterator[tuple[Node, int]]:
    """Yield the nodes that computed the inputs of ``node``, each with its output number."""
    for source, number in node.next_functions:
        if source is not None:
            yield source, number


def outline(node: Node, nodes: int) -> tuple[str | int, ...]:
    """Return a cheap fingerprint of a graph, which rarely equals that of a different structure.

    The fingerprint consists of the names of the nodes along the newest inputs, and the number of
    nodes created between each and the first. Parameters are older than tensors computed from them.

    Args:
        node: first node.
        nodes: number of nodes to visit.
    """
    number = first = node._sequence_nr()
    items: list[str | int] = []
    for _ in range(nodes):
        declared = getattr(node, "declared", None)
        name = type(node).__name__ if declared is None else f"{declared.name}, {declared.takes}"
        items += [name, first - number]
        newest = None
        for source, _ in inputs_of(node):
            made = source._sequence_nr()
            if made < first and (newest is None or made > number):
                newest, number = source, made
        if newest is None:
            break
        node = newest
    return tuple(items)
