"""In converted networks, assign to the data and gradients of parameters and other plain tensors.

A parameter changes itself, and the copy that stands for it in the call follows. A plain tensor gets
plain memory: the cells of a global tensor are gathered.
"""

from __future__ import annotations

from typing import Any
from weakref import getweakrefs

import torch
from torch.utils import swap_tensors

from gpudist.errors import ConversionError
from gpudist.sbp.global_spec import wrap_copies
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.outer import OuterTensor
from gpudist.sbp.scope import Scope, where_called
from gpudist.sbp.spectrum import compute_spectrum
from gpudist.sbp.unknown import compute_gathered, gather

T = torch.Tensor
_SET_DATA: Any = T.data.__set__  # pyright: ignore
# Functions of a leaf of the graph, with an argument at most.
_OF_LEAVES = {
    T.grad.__get__, T.grad.__set__, T.grad.__delete__,  # pyright: ignore
    T.requires_grad_, T.requires_grad.__set__,  # pyright: ignore
}  # fmt: skip
SETTERS = {*_OF_LEAVES, _SET_DATA}


def call_setter(scope: Scope, function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Call one of ``SETTERS`` on ``x``, or on the parameter that ``x`` stands for."""
    copy = scope.substitutes.get(id(x), x)
    parameter: Any = scope.originals.get(id(copy), x)
    args = tuple(value.materialize() if isinstance(value, OuterTensor) else value for value in args)
    is_global = isinstance(parameter, GlobalTensor)
    if is_global:
        args = tuple(_as_global(scope, value) for value in args)
    result = _call(scope, function, parameter, args, kwargs)
    if copy is not parameter and function not in _OF_LEAVES:
        _call(scope, _SET_DATA, copy, args if is_global else (parameter.data,), {})
    return x if result is parameter else result


def full_copy(scope: Scope, x: torch.Tensor) -> torch.Tensor:
    """Gather what a module of the network is to hold as a plain tensor."""
    x = compute_spectrum(x.materialize() if isinstance(x, OuterTensor) else x)
    return gather(x, scope) if isinstance(x, GlobalTensor) else x


def make_full(scope: Scope, parameter: Any) -> None:
    """Make a global tensor that a module lists as a parameter a plain parameter, the same object.

    Raises:
        ConversionError: on every rank alike, if the forward has used it already.
    """
    local = parameter._local
    with torch._C.DisableTorchFunction():
        learns = local.requires_grad
        is_used = learns and local._use_count() > 1
    if is_used or getweakrefs(parameter):
        raise ConversionError(
            f"{where_called(scope)}: a parameter of shape {list(parameter.shape)} was computed "
            "from global tensors and used before it was an attribute of a module, or is a view, "
            "so its gradient would not reach it; assign it first, "
            "self.name = torch.nn.Parameter(value.clone())"
        )
    full = gather(parameter, scope).detach()
    swap_tensors(parameter, torch.nn.Parameter(full, learns))


def _call(scope: Scope, function: Any, x: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(x, GlobalTensor) or not any(isinstance(y, GlobalTensor) for y in args):
        return function(x, *args, **kwargs)
    reason = "a plain tensor has memory of its own"
    return compute_gathered(GlobalTensor, scope, function, (x, *args), kwargs, reason)


def _as_global(scope: Scope, value: Any) -> Any:
    is_plain = isinstance(value, T) and not isinstance(value, GlobalTensor)
    return wrap_copies(GlobalTensor, value, scope.placement) if is_plain else value
