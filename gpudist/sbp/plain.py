"""Plain tensors that require grad beside global tensors, outside of converted networks.

Such a tensor, for example a penalty on parameters or a learned temperature, is one value, equal on
all workers, and its gradient is full on each.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gpudist.cache import cache_of
from gpudist.checks.storage import PLAIN
from gpudist.errors import ConventionError, PlanMismatch, side_by_side
from gpudist.exchange.autograd import is_eager
from gpudist.nn.parameters.gradient_graph import (
    FOLLOWED_NODES,
    NODE_LIMIT,
    Border,
    Node,
    border_of,
    ends_search,
    inputs_of,
    outline,
)
from gpudist.nn.parameters.replication import copies_of
from gpudist.sbp.global_spec import wrap_copies
from gpudist.sbp.outer import changes_in_place
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import name_of
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.world.partition import Partition

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor

_MARK = "gpudist part"
_MAX_DIMS = 16
_REMEDY = (
    "compute it from global tensors, or make it global: gpudist.to_global(x, placement, sbp), "
    "with sbp.partial_sum for a term on each worker, split for blocks and broadcast for copies"
)
# Relative difference between ranks of the sum of the cells' absolute values that is rounding.
_ROUNDING = 1e-3


def mark_part(local: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Note on the graph of ``local`` that it is a part, or a copy whose gradient is a term."""
    node: Any = local.grad_fn
    if node is not None and placement.partition.size > 1:
        # Unlike an attribute of a node of C++, its metadata live as long as the node.
        node.metadata[_MARK] = placement
    return local


class Origins(NamedTuple):
    """Operators and leaves from which a plain tensor was computed.

    Attributes:
        part: nearest operator whose output is a part, or a copy whose gradient is a term.
        has_leaf: whether it was also computed from leaves without such an operator in between.
        visited: number of nodes visited.
    """

    part: Border | None
    has_leaf: bool
    visited: int


def origins_of(x: torch.Tensor, placement: Placement) -> Origins:
    """Search the graph of ``x``, up to operators that declare the convention of gradients."""
    part, has_leaf = None, False
    pending = [x.grad_fn]
    seen: set[Node] = set(pending)
    ranks = frozenset(placement.partition.ranks)
    while pending and len(seen) < NODE_LIMIT:
        node: Node = pending.pop()
        border = _border_of(node)
        if border is not None and border.concerns(ranks):
            part = border if part is None and border.gives == "dual" else part
        elif hasattr(node, "variable"):
            has_leaf = True
        elif not ends_search(node):
            for source, _ in inputs_of(node):
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
    return Origins(part, has_leaf, len(seen))


def _border_of(node: Node) -> Border | None:
    border, placement = border_of(node), node.metadata.get(_MARK)
    if placement is not None:
        return Border("to_local", "dual", "dual", frozenset(placement.partition.ranks))
    if border is None and type(node).__name__ == "_CopyBackward":
        ranks = {
            r
            for copies in node.replicated
            if copies.holders is not None
            for r in copies.holders.ranks
        }
        border = Border("the parameters of a network", "invariant", "dual", frozenset(ranks))
    return border


def with_copies(
    kind: type[GlobalTensor], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with global copies in place of plain tensors that require grad.

    Returns:
        ``None`` if there are none. A tensor that ``function`` changes stays plain.
    """
    placement: Placement | None = None
    plain: dict[int, torch.Tensor] = {}
    changed = set(map(id, tensors_in(args[:1]))) if changes_in_place(function, kwargs) else ()

    def look(x: Any) -> None:
        nonlocal placement
        if isinstance(x, kind):
            placement = placement or x.placement
        elif type(x) in PLAIN and x.requires_grad and id(x) not in changed:
            plain[id(x)] = x

    map_tree((args, {name: x for name, x in kwargs.items() if name != "out"}), look)
    if not plain or placement is None:
        return None
    name = name_of(function)
    copies = {
        i: wrap_copies(kind, share_gradient(name, x, placement), placement)
        for i, x in plain.items()
    }
    return tuple(map_tree(tree, lambda x: copies.get(id(x), x)) for tree in (args, kwargs))


def share_gradient(name: str, x: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return ``x``, whose gradient is then the sum of the gradients on all workers.

    Raises:
        PlanMismatch: at the first call from a line, on every worker, if the workers' values differ.
        ConventionError: ``x`` was computed from parts, so that its gradient would be counted
            several times.
    """
    P = placement.partition
    if P.size == 1 or not P.active:
        return x
    _require_equal(name, x, P)
    _require_no_part(name, x, placement)
    return copies_of([x], [P.world.create_partition_inclusive(sorted(P.ranks))])[0]


def _require_no_part(name: str, x: torch.Tensor, placement: Placement) -> None:
    if x.grad_fn is None or not is_eager(x):
        return
    remembered: Any = placement.partition.wire.remembered
    seen = cache_of(remembered, "graphs of plain tensors", 256)
    key = placement, outline(x.grad_fn, 8)
    if key in seen:
        return
    part, _, visited = origins_of(x, placement)
    if part is not None:
        # The graph is the same on every worker.
        raise ConventionError(
            f"{name}: a plain tensor of shape {list(x.shape)} that requires grad is used with a "
            "global one, so it must be one value whose full gradient is on every worker, but it "
            f"comes from {part.name}, whose gradients add up over {len(part.ranks)} workers; "
            f"{_REMEDY}"
        )
    if visited > FOLLOWED_NODES:
        seen[key] = True


def _require_equal(name: str, x: torch.Tensor, P: Partition) -> None:
    """Compare the workers' values, once for each line of the program, shape and dtype."""
    if not is_eager(x) or x.is_meta:
        return
    frame: Any = sys._getframe(1)
    while _is_of_library(frame) and frame.f_back is not None:
        frame = frame.f_back
    remembered: Any = P.wire.remembered
    seen = cache_of(remembered, "equal plain tensors", 4096)
    key = P, frame.f_code, frame.f_lasti, name, x.shape, x.dtype
    seen.get_or_make(key, lambda: _compare(name, x, P))


def _is_of_library(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("gpudist", "torch")


def _compare(name: str, x: torch.Tensor, P: Partition) -> bool:
    """Raise if the shapes differ, or the sums of the cells by more than rounding."""
    cells = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    cells = cells.double()
    size, total = torch.stack([cells.abs().sum(), cells.sum()]).tolist()
    shape = [*x.shape, *[-1] * _MAX_DIMS][:_MAX_DIMS]
    rows = P.allgather_data([float(size), float(total), *map(float, shape)])
    first = rows[0]
    scale = max(row[0] for row in rows)
    if any(
        row[2:] != first[2:]
        or any(abs(a - b) > _ROUNDING * scale for a, b in zip(row[:2], first[:2], strict=True))
        for row in rows
    ):
        texts = {
            rank: f"shape {[int(n) for n in row[2:] if n >= 0]}, sum of cells {row[1]:g}"
            for rank, row in zip(P.ranks, rows, strict=True)
        }
        raise PlanMismatch(
            f"{name}: a plain tensor that requires grad is used with a global one, so it must be "
            f"one value, equal on all workers, but they have {side_by_side(texts)}; {_REMEDY}"
        )
    return True
