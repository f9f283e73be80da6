"""Functions of lists of tensors, and fused optimizers: ``torch._foreach_*``, ``torch._fused_*``.

Where the i-th tensors of all lists have the same cells on each rank, torch's function computes on
the parts of all of them at once. Otherwise it is applied to one tensor after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpudist.exchange import all_reduce
from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.sbp import methods, views
from gpudist.sbp.call import Function
from gpudist.sbp.global_spec import GlobalSpec, local_of
from gpudist.sbp.registry import compose
from gpudist.sbp.scope import current_scope

# Functions of torch with an in-place method of the same name in torch.Tensor.
NAMES = (
    "abs", "add", "addcdiv", "addcmul", "ceil", "clamp_max", "clamp_min", "div", "exp", "floor",
    "lerp", "log", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sqrt",
    "sub", "tanh", "trunc",
)  # fmt: skip


def enter(name: str, function: Function, is_elementwise: bool = True) -> None:
    """Register ``torch._foreach_<name>`` as ``function`` of the i-th entry of each list."""
    changes_in_place = name.endswith("_")
    native = getattr(torch, f"_foreach_{name}")

    def together(tensors: Sequence[Tensor], *others: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not is_aligned(tensors, (*others, *kwargs.values())):
            return NotImplemented
        results = _on_parts(native, tensors, others, kwargs)
        if changes_in_place:
            return None
        return [_like(x, y) for x, y in zip(tensors, results, strict=True)]

    if is_elementwise:
        methods.METHODS[native] = together

    @compose(native)
    def each(tensors: Sequence[Tensor], *others: Any, **kwargs: Any) -> list[Any] | None:
        results: list[Any] = []
        for i, x in enumerate(tensors):
            entries = [_ith(argument, i) for argument in others]
            named = {key: _ith(argument, i) for key, argument in kwargs.items()}
            results.append(function(x, *entries, **named))
        return None if changes_in_place else results


def is_aligned(tensors: Sequence[Tensor], others: Sequence[Any]) -> bool:
    """Return whether an elementwise function of lists can compute on this rank's parts.

    The answer is the same on every rank.
    """
    specs = [getattr(x, "_global_spec", None) for x in tensors]
    if current_scope() is not None or any(map(_has_views, tensors)):
        return False
    if any(spec is not None and partial_sum in spec.sbp for spec in specs):
        return False
    for argument in others:
        if isinstance(argument, Tensor):
            if argument.dim() or not _is_number_for(argument, specs):
                return False
        elif isinstance(argument, (list, tuple)) and not all(map(_has_same_cells, argument, specs)):
            return False
    return True


def _has_views(x: Tensor) -> bool:
    return hasattr(x, "_global_spec") and (views.may_be_followed(x) or views.concerns(x))


def _has_same_cells(x: Any, spec: GlobalSpec | None) -> bool:
    # Numbers, and plain tensors without dims, go with any tensor.
    spec_of_x: GlobalSpec | None = getattr(x, "_global_spec", None)
    if spec_of_x is None or spec is None:
        return spec_of_x is spec or not isinstance(x, Tensor) or (spec_of_x is None and not x.dim())
    return spec_of_x is spec or (
        spec_of_x.placement == spec.placement and spec_of_x.layout == spec.layout
    )


def _is_number_for(x: Any, specs: Sequence[GlobalSpec | None]) -> bool:
    """Return whether each rank that has cells of the tensors has the number ``x``."""
    spec_of_x: GlobalSpec | None = getattr(x, "_global_spec", None)
    if spec_of_x is None:
        return type(x) in (Tensor, torch.nn.Parameter)
    ranks = spec_of_x.placement.partition.ranks
    return all(attribute == broadcast for attribute in spec_of_x.sbp) and all(
        spec is not None and spec.placement.partition.ranks == ranks for spec in specs
    )


def _on_parts(function: Function, tensors: Any, others: Any, options: dict[str, Any]) -> Any:
    arguments = [_parts(argument) for argument in (tensors, *others)]
    return function(*arguments, **{name: _parts(argument) for name, argument in options.items()})


def _parts(argument: Any) -> Any:
    if type(argument) in (list, tuple):
        return [getattr(x, "_local", x) for x in argument]
    local = getattr(argument, "_local", argument)
    # A rank outside the placement has no number for its parts, which are empty too.
    return local.sum() if isinstance(local, Tensor) and local.dim() > argument.dim() else local


def _like(x: Any, part: Tensor) -> Tensor:
    if not hasattr(x, "_global_spec"):
        return part
    return x._with_part(part) if part.dtype == x._global_spec.dtype else x.like(part)


def _ith(argument: Any, i: int) -> Any:
    return argument[i] if isinstance(argument, (list, tuple)) else argument


def with_value(function: Function) -> Function:
    """Adapt ``addcmul`` or ``addcdiv`` to take the value as the last argument."""

    def compute(x: Tensor, a: Tensor, b: Tensor, value: Any = 1, scalars: Any = None) -> Tensor:
        return function(x, a, b, value=value if scalars is None else scalars)

    return compute


def extreme(function: Function, clamp: Function, x: Tensor, other: Any) -> Tensor:
    """Return the cell-wise extreme of a tensor and another tensor, or a number."""
    return function(x, other) if isinstance(other, Tensor) else clamp(x, other)


for name in NAMES:
    plain, in_place = getattr(torch, name), getattr(Tensor, f"{name}_")
    takes_value = name.startswith("addc")
    enter(name, with_value(plain) if takes_value else plain)
    enter(f"{name}_", with_value(in_place) if takes_value else in_place)
for name, clamp in (("maximum", torch.clamp_min), ("minimum", torch.clamp_max)):
    of_two = partial(extreme, getattr(torch, name), clamp)
    enter(name, of_two)
    enter(f"{name}_", lambda x, other, of_two=of_two: x.copy_(of_two(x, other)))
if hasattr(torch, "_foreach_clone"):
    # torch 2.11 lacks this function, and its optimizers do not use it.
    enter("clone", Tensor.clone)
enter("copy_", Tensor.copy_)
enter("zero_", Tensor.zero_)
enter("norm", torch.linalg.vector_norm, is_elementwise=False)


def _enter_fused(name: str) -> None:
    function = getattr(torch, name)

    @methods.entry(function)
    @compose(function)
    def step(tensors: Sequence[Tensor], *states: Any, **options: Any) -> None:
        if not is_aligned(tensors, states):
            raise NotImplementedError(
                f"torch.{name}: gradients or state are laid out otherwise than the parameters; "
                "use fused=False"
            )
        _on_parts(function, tensors, states, options)


for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"):
    _enter_fused(name)


@methods.entry(torch._amp_foreach_non_finite_check_and_unscale_)  # pyright: ignore
@compose(torch._amp_foreach_non_finite_check_and_unscale_)  # pyright: ignore
def unscale(tensors: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Scale gradients on each rank; all ranks learn whether any cell is infinite or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore
        [local_of(x) for x in tensors], found_inf, inv_scale
    )
    specs = [x._global_spec for x in tensors if hasattr(x, "_global_spec")]
    for P in dict.fromkeys(spec.placement.partition for spec in specs):
        if P.active:
            found_inf.copy_(all_reduce(found_inf, P, "max"))
