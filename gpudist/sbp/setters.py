"""In converted networks, let parameters and buffers hold what a forward assigns to them.

A forward assigns to ``data`` and ``grad``, and to parameters and buffers of modules. A parameter
changes itself, and the copy that stands for it in the call follows. Global tensors are gathered
where a plain tensor is to hold the cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import getweakrefs

import torch
from torch.utils import swap_tensors

from gpudist.checks.storage import PLAIN
from gpudist.errors import ConversionError
from gpudist.sbp.global_spec import wrap_copies
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.scope import Scope, enter_scope, where_called
from gpudist.sbp.unknown import gather

T = torch.Tensor
# Functions of a leaf of the graph, with an argument at most.
_OF_LEAVES = {
    T.grad.__get__, T.grad.__set__, T.grad.__delete__,  # pyright: ignore
    T.requires_grad_, T.requires_grad.__set__,  # pyright: ignore
}  # fmt: skip
SETTERS = {*_OF_LEAVES, T.data.__set__}  # pyright: ignore


def call_setter(scope: Scope, function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Call one of ``SETTERS`` on ``x``, or on the parameter that ``x`` stands for."""
    copy = scope.substitutes.get(id(x), x)
    parameter: Any = scope.originals.get(id(copy), x)
    if copy is not parameter or not isinstance(x, GlobalTensor):
        args = tuple(gather(value, scope) for value in args)
    is_alone = copy is parameter or function in _OF_LEAVES
    results = [
        function(target, *_values_for(scope, target, args), **kwargs)
        for target in ((parameter,) if is_alone else (parameter, copy))
    ]
    return x if results[0] is parameter else results[0]


def _values_for(scope: Scope, target: Any, values: Sequence[Any]) -> list[Any]:
    return [
        wrap_copies(GlobalTensor, y, scope.placement)
        if isinstance(target, GlobalTensor) and type(y) in PLAIN
        else y
        for y in values
    ]


def listed(scope: Scope, x: Any) -> Any:
    """Return what a module is to list in place of a computed tensor: a plain one. Collective.

    A parameter stays the same object.

    Raises:
        ConversionError: on every rank alike, if a parameter has been used already.
    """
    if not getattr(x, "_is_param", False):
        with enter_scope(scope):
            return gather(x, scope)
    with torch._C.DisableTorchFunction():
        if getweakrefs(x) or (x._local.requires_grad and x._local._use_count() > 1):
            raise ConversionError(
                f"{where_called(scope)}: a parameter of shape {list(x.shape)} was computed from "
                "global tensors and used before it was an attribute of a module, or is a view, so "
                "its gradient would not reach it; assign it first, "
                "self.name = torch.nn.Parameter(value.clone())"
            )
    swap_tensors(x, torch.nn.Parameter(gather(x, scope).detach(), x.requires_grad))
    return x
