"""Gradients of plain tensors in the forward of a converted network.

A plain tensor is a copy on every worker, and its gradient is a term on each: the gradient is the
sum of the terms. Torch's own functions are linear in it. A user's function need not be, such as a
hook that clips: it receives the sum, and the first worker continues with its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call

from gpudist.errors import ConversionError
from gpudist.exchange.tracing import is_recorded
from gpudist.sbp.boxing import box
from gpudist.sbp.scope import Scope, where_called
from gpudist.sbp.trees import tensors_in

T = torch.Tensor
_get_unwrapped: Any = torch._C._functorch.get_unwrapped  # pyright: ignore
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore


def is_users(cls: type[torch.autograd.Function]) -> bool:
    """Return whether a function is neither of torch nor of this library."""
    return cls.__module__.partition(".")[0] not in ("torch", "gpudist")


def sum_of_terms(scope: Scope, gradient: torch.Tensor) -> torch.Tensor:
    """Return the full gradient on every worker, given this worker's term."""
    layout = scope.placement.copies(tuple(gradient.shape))
    return box(gradient, layout.dual, layout, scope.placement.partition.world)


@contextmanager
def sums_at_leaves(scope: Scope | None) -> Iterator[None]:
    """Sum the gradients of leaves that a forward made, in a backward within the forward."""
    handles: list[Any] = []
    if scope is not None:
        leaves = [leaf() for leaf in scope.leaves.values()]
        hook = partial(sum_of_terms, scope)
        handles = [x.register_hook(hook) for x in leaves if x is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def term_of(scope: Scope, gradient: torch.Tensor) -> torch.Tensor:
    """Return this worker's term of a gradient that is full on every worker."""
    layout = scope.placement.copies(tuple(gradient.shape))
    return box(gradient, layout, layout.dual, scope.placement.partition.world)


def _register_hook(scope: Scope, register: Any, x: torch.Tensor, hook: Any) -> Any:
    # The gradient of a parameter is the sum.
    is_parameter = id(x) in scope.substitutes
    if register is not T.register_hook or is_parameter or not x.requires_grad:
        return register(x, hook)
    if is_recorded():
        raise ConversionError(
            f"{where_called(scope)}: register_hook: compiled: a recorded graph has no hooks; "
            "compute the gradient by functions of torch, or call the network itself"
        )

    def with_sum(gradient: torch.Tensor) -> torch.Tensor | None:
        if scope.plain_backwards:
            return hook(gradient)
        whole = sum_of_terms(scope, gradient)
        version = whole._version
        changed = hook(whole)
        if changed is None and whole._version == version:
            return None
        return term_of(scope, whole if changed is None else changed)

    return register(x, with_sum)


def _retain_grad(scope: Scope, retain: Any, x: torch.Tensor) -> None:
    if x.requires_grad and not x.is_leaf and all(x is not y for y in scope.substitutes.values()):
        raise ConversionError(
            f"{where_called(scope)}: retain_grad: the grad of a plain tensor of shape "
            f"{list(x.shape)} would be this worker's term; x.register_hook(hook) calls hook with "
            "the full gradient"
        )
    retain(x)


def _backward(scope: Scope, backward: Any, *args: Any, **kwargs: Any) -> Any:
    scope.plain_backwards += 1
    try:
        return backward(*args, **kwargs)
    finally:
        scope.plain_backwards -= 1


def _call_in_transform(scope: Scope, call: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = map(_unwrap, tensors_in(args))
    if is_users(cls) and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ConversionError(
            f"{where_called(scope)}: {cls.__name__}.apply: within a transform of torch.func, its "
            "backward would receive this worker's term of the gradient of a plain tensor; apply "
            "it outside of the transform, or detach its inputs"
        )
    return call(cls, *args, **kwargs)


def _unwrap(x: torch.Tensor) -> torch.Tensor:
    while _is_wrapped(x):
        x = _get_unwrapped(x)
    return x


# Functions of plain tensors by which a forward reaches gradients.
OF_GRADIENTS: dict[Any, Callable[..., Any]] = {
    T.register_hook: _register_hook,
    T.register_post_accumulate_grad_hook: _register_hook,
    T.retain_grad: _retain_grad,
    custom_function_call: _call_in_transform,
    **dict.fromkeys([T.backward, torch.autograd.backward, torch.autograd.grad], _backward),
}
