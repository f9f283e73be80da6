"""``torch._foreach_*``: apply a function to the tensors of several lists, in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpudist.sbp.registry import Function, compose

# Functions of torch with an in-place method of the same name in torch.Tensor.
NAMES = (
    "abs", "add", "addcdiv", "addcmul", "ceil", "clamp_max", "clamp_min", "div", "exp", "floor",
    "lerp", "log", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sqrt",
    "sub", "tanh", "trunc",
)  # fmt: skip


def enter(name: str, function: Function) -> None:
    """Register ``torch._foreach_<name>`` as ``function`` of the i-th entry of each list."""
    is_in_place = name.endswith("_")

    @compose(getattr(torch, f"_foreach_{name}"))
    def each(tensors: Sequence[Tensor], *others: Any, **kwargs: Any) -> list[Any] | None:
        results: list[Any] = []
        for i, x in enumerate(tensors):
            own = [_ith(one, i) for one in others]
            named = {key: _ith(one, i) for key, one in kwargs.items()}
            results.append(function(x, *own, **named))
        return None if is_in_place else results


def _ith(argument: Any, i: int) -> Any:
    return argument[i] if isinstance(argument, (list, tuple)) else argument


def with_value(function: Function) -> Function:
    """Adapt ``addcmul`` or ``addcdiv`` to take the value as the last argument."""

    def computed(x: Tensor, a: Tensor, b: Tensor, value: Any = 1, scalars: Any = None) -> Tensor:
        return function(x, a, b, value=value if scalars is None else scalars)

    return computed


def maximum_(x: Tensor, other: Any) -> Tensor:
    return x.copy_(torch.maximum(x, other)) if isinstance(other, Tensor) else x.clamp_min_(other)


def minimum_(x: Tensor, other: Any) -> Tensor:
    return x.copy_(torch.minimum(x, other)) if isinstance(other, Tensor) else x.clamp_max_(other)


def maximum(x: Tensor, other: Any) -> Tensor:
    return torch.maximum(x, other) if isinstance(other, Tensor) else x.clamp_min(other)


def minimum(x: Tensor, other: Any) -> Tensor:
    return torch.minimum(x, other) if isinstance(other, Tensor) else x.clamp_max(other)


for name in NAMES:
    plain, in_place = getattr(torch, name), getattr(Tensor, f"{name}_")
    takes_value = name.startswith("addc")
    enter(name, with_value(plain) if takes_value else plain)
    enter(f"{name}_", with_value(in_place) if takes_value else in_place)
for function in (maximum, minimum, maximum_, minimum_):
    enter(function.__name__, function)
if hasattr(torch, "_foreach_clone"):
    # torch 2.11 lacks this function, and its optimizers do not use it.
    enter("clone", Tensor.clone)
enter("copy_", Tensor.copy_)
enter("zero_", Tensor.zero_)
enter("norm", torch.linalg.vector_norm)
