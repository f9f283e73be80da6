"""Apply an ``autograd.Function`` of global tensors to full tensors.

:mod:`gpudist.sbp.functions` dispatches it, in networks and outside of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

from gpudist.cache import cache_of
from gpudist.errors import ConversionError
from gpudist.exchange.tracing import is_traced
from gpudist.geometry.layout import broadcast
from gpudist.sbp.boxing import box_both_ways
from gpudist.sbp.copies import require_copies, with_copies
from gpudist.sbp.functions import apply_to_plain
from gpudist.sbp.global_spec import wrap_copies
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.interception import is_intercepting
from gpudist.sbp.methods import entry
from gpudist.sbp.outer import materialize_in
from gpudist.sbp.placement import Placement
from gpudist.sbp.plain import share_gradient
from gpudist.sbp.scope import Repeatable, Scope, current_draws, current_scope, where_called
from gpudist.sbp.terms import is_users
from gpudist.sbp.to_global import from_part
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.sbp.unknown import cut_like, settle, stand_in

T = torch.Tensor
# Functions that only read the tensors they have saved.
_KEEPING = {"_NoopSaveInputs"}
# Functions that return their last arguments: those of full backward hooks, FSDP2 and DDP.
_IDENTITIES = {"BackwardHookFunction", "RegisterPostBackwardFunction", "_DDPSink"}


@entry(torch.autograd.Function)
def apply_function(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an ``autograd.Function`` in a scope, or to global tensors."""
    scope = current_scope()
    name = cls.__name__
    args, kwargs = materialize_in(cls, args, kwargs)
    global_tensors = _global_in(args, kwargs)
    if name == "CheckpointFunction" and (global_tensors or current_draws() is not None):
        run, preserve, *inputs = args
        return torch.utils.checkpoint.checkpoint(
            run, *inputs, use_reentrant=False, preserve_rng_state=preserve
        )
    if scope is not None and name not in _KEEPING:
        args, kwargs = with_copies(scope, cls, args, kwargs, bool(global_tensors)) or (args, kwargs)
        global_tensors = _global_in(args, kwargs)
        if is_traced() and _want_gradient([args, kwargs]):
            raise ConversionError(
                f"{where_called(scope)}: {name}.apply: a recorded graph cannot call the backward "
                "of a function; compute with torch's functions, call the network without "
                "gradients, or call it outside of gpudist.compiled"
            )
        if not global_tensors and _backward_gets_terms(scope, cls, args):
            convert = partial(as_global_copies, scope, f"{name}.apply")
            args, kwargs = map_tree(args, convert), map_tree(kwargs, convert)
            global_tensors = _global_in(args, kwargs)
    if name == "CheckpointFunction":
        args = (Repeatable(args[0]), *args[1:])
    if not global_tensors or name in _KEEPING:
        return apply_to_plain(cls, args, kwargs)
    if name in _IDENTITIES:
        return _identity(cls, args)
    if scope is None and not _want_gradient([args, kwargs]):
        # Torch calls the forward without gradients, on operators with rules.
        return apply_to_plain(cls, args, kwargs)
    scope = scope or _scope_outside_of_networks(global_tensors[0].placement)
    return _on_whole(scope, cls, args, kwargs)


def _global_in(args: Any, kwargs: Any) -> list[GlobalTensor]:
    return [x for x in tensors_in([args, kwargs]) if isinstance(x, GlobalTensor)]


def _backward_gets_terms(scope: Scope, cls: Any, args: tuple[Any, ...]) -> bool:
    return (
        is_users(cls)
        and any(isinstance(x, T) and x.requires_grad for x in args)
        and plain_gradients_are_terms(scope)
    )


def plain_gradients_are_terms(scope: Scope) -> bool:
    # A rule's compute and the forward of an autograd.Function have parts and full tensors instead.
    return (
        torch.is_grad_enabled()
        and not scope.applying
        and scope.placement.partition.size > 1
        and is_intercepting(scope)
    )


def as_global_copies(scope: Scope, name: str, x: Any) -> Any:
    if isinstance(x, GlobalTensor) or not (isinstance(x, T) and x.requires_grad):
        return x
    require_copies(scope, name, [x])
    return wrap_copies(GlobalTensor, x, scope.placement)


def _want_gradient(tree: Any) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(tree))


def _scope_outside_of_networks(placement: Placement) -> Scope:
    scopes = cache_of(placement.partition.wire.remembered, "functions outside of a network")
    return scopes.get_or_make(placement, lambda: Scope(placement, gather_limit_bytes=sys.maxsize))


def _identity(cls: Any, args: Sequence[Any]) -> Any:
    parts: list[Any] = [x._local if isinstance(x, GlobalTensor) else x for x in args]
    if cls.__name__ == "_DDPSink" and parts[0]().find_unused_parameters:
        # Only the parts have the graph in which the reducer looks for unused parameters.
        network = parts[0]()
        if network.require_forward_param_sync and not network.static_graph:
            network.reducer.prepare_for_backward([x for x in parts[1:] if isinstance(x, T)])
    results = apply_to_plain(cls, parts, {})
    results = results if isinstance(results, tuple) else (results,)
    ends = zip(args[len(args) - len(results) :], results, strict=True)
    return tuple([x.like(y) if isinstance(x, GlobalTensor) else y for x, y in ends])


def _on_whole(scope: Scope, cls: Any, args: Any, kwargs: Any) -> Any:
    """Apply a function to full tensors; its backward receives full gradients."""
    tensors: list[Any] = list({id(x): x for x in tensors_in([args, kwargs])}.values())
    global_tensors = [x for x in tensors if isinstance(x, GlobalTensor)]
    split = [x for x in global_tensors if not x.is_copy_everywhere]
    settle(
        scope, f"{cls.__name__}.apply", split, "an autograd.Function has no rule for blocks", bool
    )
    placement = global_tensors[0].placement
    world, copies = placement.partition.world, (broadcast,) * placement.axes
    is_in_network = current_scope() is not None

    def once(x: torch.Tensor) -> torch.Tensor:
        """Return the full ``x``; every worker has its full gradient."""
        if isinstance(x, GlobalTensor):
            whole = x.to_global(placement, copies).to_local(grad_sbp=copies)
            return whole if placement.active else stand_in(whole, x.shape)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if is_in_network:
            require_copies(scope, f"{cls.__name__}.apply", [x])
        else:
            x = share_gradient(f"{cls.__name__}.apply", x, placement)
        if not placement.active:
            return x.detach() + x.reshape(-1)[:0].sum()
        layout = placement.copies(tuple(x.shape))
        return box_both_ways(x, [layout], [layout, layout.dual], world)

    wholes = {id(x): once(x) for x in tensors}
    versions = [wholes[id(x)]._version for x in global_tensors]
    scope.applying += 1
    try:
        result = apply_to_plain(
            cls,
            map_tree(args, lambda x: wholes.get(id(x), x)),
            map_tree(kwargs, lambda x: wholes.get(id(x), x)),
        )
    finally:
        scope.applying -= 1
        if [wholes[id(x)]._version for x in global_tensors] != versions:
            raise ConversionError(
                f"{cls.__name__}.apply: the function changes an input in place, which is a copy of "
                "the tensor; return a new tensor"
            )
    like = max(split, key=lambda x: x.numel(), default=None)

    def back(y: Any) -> Any:
        if not isinstance(y, torch.Tensor):
            return y
        layout = placement.copies(tuple(y.shape))
        return cut_like(from_part(y, placement, layout, [layout.dual, layout]), like)

    return map_tree(result, back)
