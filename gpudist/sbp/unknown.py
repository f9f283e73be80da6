"""In converted networks, compute functions without a rule on full tensors on every worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from gpudist.checks.storage import dtype_remedy, is_about_dtypes
from gpudist.errors import ConversionError
from gpudist.geometry.layout import broadcast
from gpudist.sbp import views
from gpudist.sbp.boxing import boxed_bytes
from gpudist.sbp.call import share_memory
from gpudist.sbp.global_spec import spec_of, wrap_copies
from gpudist.sbp.outer import OuterTensor, changes_in_place
from gpudist.sbp.registry import name_of
from gpudist.sbp.remedies import can_have_rule
from gpudist.sbp.scope import PlanRow, Scope, place_of_call, where_called
from gpudist.sbp.trees import map_tree, tensors_in

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor


def compute_gathered(
    kind: type[GlobalTensor],
    scope: Scope,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reason: str = "it has no rule for blocks",
) -> Any:
    """Gather the inputs, compute ``function`` on every worker, and split the results again.

    In-place changes of the gathered tensors are also applied to the blocks.

    Raises:
        ConversionError: on every rank alike, if the scope does not allow gathering, or the inputs
            exceed its limit.
    """
    inputs: list[Any] = list(dict.fromkeys(tensors_in([args, kwargs])))
    split = [x for x in inputs if isinstance(x, kind) and not x.is_copy_everywhere]
    register = partial(can_have_rule, function, args, kwargs)
    settle(scope, name_of(function), split, reason, register)
    record = scope.record
    sent = record.sent_bytes() if record is not None else 0
    rows = len(record.rows) if record is not None else 0
    wholes: dict[int, Any] = {id(x): gather(x, scope) for x in inputs}
    versions = {id(x): wholes[id(x)]._version for x in inputs}

    def of(leaf: Any) -> Any:
        return wholes.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

    try:
        result = function(*map_tree(args, of), **map_tree(kwargs, of))
    except NotImplementedError as error:
        remedy = dtype_remedy([x.dtype for x in inputs]) if is_about_dtypes(error) else ""
        if remedy:
            error.args = (f"{name_of(function)}: {error}; {remedy}",)
        raise
    originals = {id(wholes[id(x)]): x for x in inputs}
    for x in inputs:
        whole = wholes[id(x)]
        # ``apply_`` counts no version.
        is_first = x is args[0] and changes_in_place(function, kwargs)
        if (whole._version == versions[id(x)] and not is_first) or not isinstance(x, kind):
            continue
        if whole is not x._local:
            x.copy_(wrap_copies(kind, whole, scope.placement))
        elif views.concerns(x):
            views.require_writable(name_of(function), x)
            views.propagate_change(x)
    like = max(split, key=lambda x: x.numel(), default=None)
    like = next((x for x in inputs if isinstance(x, kind) and spec_of(x).is_held), like)

    places = {id(leaf): place for place, leaf in enumerate(tensors_in(result))}

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, kind):
            return leaf
        if id(leaf) in originals:
            return originals[id(leaf)]
        whole = wrap_copies(kind, leaf, scope.placement)
        y = cut_like(whole, like)
        for x in inputs:
            if isinstance(x, kind) and share_memory(leaf, wholes[id(x)]):
                is_whole = x.is_copy_everywhere and x.placement == scope.placement
                is_copy = y is not whole or not is_whole
                views.note(y, x, function, args, kwargs, None, is_copy, places[id(leaf)])
        return y

    results = map_tree(result, back)
    if record is not None:
        outputs = tensors_in(results)
        # The row also counts the movements made for this function.
        del record.rows[rows:]
        record.add(
            PlanRow(
                place_of_call(scope)[0],
                name_of(function),
                ", ".join(str(x.sbp) for x in inputs if isinstance(x, kind)),
                ", ".join(str(x.sbp) for x in outputs if isinstance(x, kind)),
                sum(x.numel() for x in outputs),
                record.sent_bytes() - sent,
                bool(split),
                True,
            )
        )
    return results


def cut_like(y: GlobalTensor, like: GlobalTensor | None) -> GlobalTensor:
    """Split the replicated ``y`` like ``like``, if the dims to split have the same extents."""
    if like is None or y.dim() != like.dim() or like.global_layout.count("partial_sum") > 1:
        return y
    dims = [attribute.dim for attribute in like.sbp if attribute.is_split]
    if any(y.shape[d] != like.shape[d] for d in dims):
        return y
    return y.to_global(like.placement, like.sbp)


def gather(x: Any, scope: Scope) -> Any:
    """Return the plain tensor of all cells of ``x`` on every worker of the network. Collective."""
    if isinstance(x, OuterTensor):
        x = x.whole() if x.materialized is None else x.materialized
    if not hasattr(x, "_local"):
        return x
    whole = x._local
    if x.placement.partition.size < scope.placement.partition.size:
        # Workers without a part compute the function, too.
        x = x.to_global(scope.placement, (broadcast,) * scope.placement.axes)
        whole = x._local
    if not x.is_copy_everywhere:
        whole = x.to_global(sbp=(broadcast,) * x.placement.axes)._local
    if not x.placement.active:
        return stand_in(whole, x.shape)
    strides = spec_of(x).strides
    if strides is None or 0 in strides or whole is x._local:
        return whole
    return torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device).copy_(
        whole
    )


def stand_in(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return zeros of the full shape, connected to the graph of this rank's empty part.

    Ranks outside the placement also call the function, to learn the structure and the shapes of its
    results.
    """
    zeros = part.new_zeros(tuple(shape))
    return zeros + part.sum() if part.requires_grad and torch.is_grad_enabled() else zeros


def settle(
    scope: Scope,
    name: str,
    split: Sequence[GlobalTensor],
    reason: str,
    can_register: Callable[[], bool],
) -> None:
    """Raise for a function without a rule if the scope says so, else warn once per call site.

    Args:
        scope: scope of the network.
        name: name of the function.
        split: its inputs that workers do not have in full.
        reason: why it is not computed on blocks.
        can_register: returns whether a rule can be registered for it.

    Raises:
        ConversionError: on every rank alike.
    """
    if not split:
        return
    held = sum(prod(x.shape) * x.element_size() for x in split)
    moved = sum(
        boxed_bytes(x.global_layout, x.placement.copies(tuple(x.shape)), x.dtype) for x in split
    )
    workers = split[0].placement.partition.size
    where = f"{where_called(scope)}: {name}"
    if scope.unknown == "refuse":
        raise ConversionError(
            f"{where}: {reason}, and unknown='refuse'; use functions with a rule"
            f"{_register(can_register)}, or pass unknown='gather'"
        )
    limit = scope.gather_limit_bytes
    if limit is None:
        limit = 2 * scope.largest_block_bytes * workers
    largest = max(prod(x.shape) * x.element_size() for x in split)
    if largest > limit:
        raise ConversionError(
            f"{where}: {reason}, and an input of {largest} bytes exceeds the limit of {limit} "
            f"bytes for gathering on each of {workers} workers; pass gather_limit_bytes={largest} "
            f"to allow it, or use functions with a rule{_register(can_register)}"
        )
    _, file, line = place_of_call(scope)
    key = (name, file, line)
    if key not in scope.warned:
        scope.warned.add(key)
        if scope.placement.partition.rank == 0:
            warnings.warn_explicit(
                f"{where}: {reason}; {held} bytes of inputs are gathered by moving {moved} bytes "
                f"between {workers} workers, and each worker computes the whole result",
                UserWarning,
                file or "gpudist",
                line,
            )


def _register(can_register: Callable[[], bool]) -> str:
    return ", or register one with gpudist.sbp.registry.register" if can_register() else ""
