"""Make ``autograd.Function.apply`` dispatch to global tensors, as torch's own functions do.

Torch calls the forward of a ``Function`` in C++ and does not ask its arguments. A global tensor
never requires grad there, because only its parts carry the graph, so the result would be a
constant. ``Function.apply`` ends in ``super().apply``: a method of the class in between is called
by every ``apply``, also by one that was bound to a name before.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import swap_tensors

from gpudist.errors import ConversionError
from gpudist.exchange.autograd import FunctionBase
from gpudist.sbp.methods import MAY_TAKE_DATA, METHODS
from gpudist.sbp.scope import current_draws, current_scope

_above: Any = super
# Torch dispatches neither this function nor ``swap_tensors``.
_set_memory: Any = torch.Tensor.set_
_library = torch.library.Library("aten", "IMPL")
# Types of arguments and results that neither are global tensors nor contain them.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, str})
_requires_grad: Any = torch.Tensor.requires_grad.__get__  # pyright: ignore


def dispatch_functions() -> None:
    """Dispatch ``Function.apply``, hooks of modules, checkpoints and setters from now on.

    Called before a global tensor is made.
    """
    base: Any = FunctionBase
    if "apply" not in vars(base):
        base.apply = classmethod(_dispatch_apply)
        for key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
            # Plain tensors answer in C++, and the class of a global one answers for it.
            _library.impl(MAY_TAKE_DATA, torch.library.fallthrough_kernel, key)
        torch.utils.swap_tensors, torch.Tensor.set_ = _swap_tensors, _set  # pyright: ignore
        # Torch's own functions around a module's forward, of which it has no hook.
        torch.nn.modules.module.BackwardHook = METHODS[torch.utils.hooks.BackwardHook]
        checkpoint: Any = torch.utils.checkpoint
        name = "_checkpoint_without_reentrant_generator"
        setattr(checkpoint, name, METHODS[getattr(checkpoint, name)])


def _is_parameter_of_call(x: Any) -> bool:
    scope = current_scope()
    return scope is not None and (id(x) in scope.substitutes or id(x) in scope.originals)


@wraps(_set_memory)
def _set(x: Any, *args: Any, **kwargs: Any) -> Any:
    if _is_parameter_of_call(x) or any(hasattr(y, "_local") for y in (x, *args)):
        x.data, *_ = args
        return x
    return _set_memory(x, *args, **kwargs)


@wraps(swap_tensors)
def _swap_tensors(t1: Any, t2: Any) -> None:
    is_mixed = hasattr(t1, "_local") != hasattr(t2, "_local")
    if is_mixed or _is_parameter_of_call(t1) or _is_parameter_of_call(t2):
        raise ConversionError(
            f"swap_tensors: a tensor of shape {list(t1.shape)} is a parameter of the network that "
            "is being called, or a global tensor while the other one is plain; assign its data, "
            "x.data = value"
        )
    swap_tensors(t1, t2)


def _dispatch_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # On the path of every function of the process.
    if current_draws() is None and not kwargs and cls.__name__ != "CheckpointFunction":
        for x in args:
            if type(x) not in _PLAIN and _has_global(x):
                break
        else:
            result = _above(FunctionBase, cls).apply(*args)
            if type(result) not in _PLAIN and _has_global(result):
                _require_graph(cls, result)
            return result
    return METHODS[torch.autograd.Function](cls, args, kwargs)


def apply_to_plain(cls: Any, args: Any, kwargs: Any) -> Any:
    """Apply a function by torch's own ``apply``.

    Raises:
        ConversionError: the function makes a global tensor from plain tensors that require grad.
    """
    result = _above(FunctionBase, cls).apply(*args, **kwargs)
    if _has_global(result):
        _require_graph(cls, result)
    return result


def _has_global(x: Any) -> bool:
    if isinstance(x, dict):
        return any(map(_has_global, x.values()))
    if isinstance(x, (tuple, list)):
        return any(map(_has_global, x))
    return hasattr(type(x), "__distributed_layer__")


def _require_graph(cls: Any, result: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        results = result if isinstance(result, tuple) else (result,)
        is_lost = any(isinstance(y, torch.Tensor) and _requires_grad(y) for y in results)
    if is_lost:
        remedy = "pass the global tensors that its forward reads as arguments of apply"
        if cls.__name__ == "CheckpointFunction":
            remedy = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
        raise ConversionError(
            f"{cls.__name__}.apply: its arguments are plain tensors that require grad and its "
            f"forward returns a global tensor, whose gradient would not reach them; {remedy}"
        )
