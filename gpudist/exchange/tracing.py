"""State of torch on this thread: whether it compiles, traces, transforms or runs operations."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import Enum
from functools import partial, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpudist.checks.storage import PLAIN
from gpudist.errors import GpudistError, ShapeError

F = TypeVar("F", bound=Callable[..., Any])

# Types that every supported Dynamo passes as constants.
_CONSTANTS = (
    bool, int, float, str, tuple, list, dict, type, type(None), Enum, FunctionType,
    torch.dtype, torch.device,
)  # fmt: skip

_private: Any = torch._C
_functorch: Any = _private._functorch
_has_transforms: Callable[[], bool] = _private._are_functorch_transforms_active
_count_modes: Callable[[], int] = _private._len_torch_dispatch_stack
# Torch includes this key while there are modes that record above autograd.
_is_included: Callable[[Any], bool] = _private._dispatch_tls_is_dispatch_key_included
_EARLY = _private.DispatchKey.PreDispatch
_early_mode: Callable[[Any], Any] = torch._ops._get_dispatch_mode_pre_dispatch
_script_tracer: Callable[[], object] = _private._get_tracing_state
# What :func:`is_eager` asks of torch, as functions of C++: it may be true unless one returns true.
QUESTIONS: tuple[Callable[[], Any], ...] = (
    _has_transforms, _count_modes, partial(_is_included, _EARLY), _script_tracer,
)  # fmt: skip


class _ThreadState(threading.local):
    """State of the current thread."""

    binds_for_compiler = False
    watching_modes = 0


_thread = _ThreadState()
# Of a frame, and of those that it calls.
_AS_IT_IS = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)
_PROXY = _private._TorchDispatchModeKey.PROXY


def is_recorded(x: torch.Tensor | None = None) -> bool:
    """Return whether torch records or replaces operations.

    This is the case under torch.compile, dispatch modes and functionalization. Movements must then
    be operations of this library. All ranks must be under the same modes.

    Args:
        x: input tensor, which may be a subclass with its own operations, such as a fake tensor.

    Raises:
        GpudistError: under torch.jit.trace, which would record moved data as a constant.
    """
    if is_dynamo_compiling():
        return True
    if _script_tracer() is not None:
        raise GpudistError(
            "torch.jit.trace cannot record a movement between workers; use torch.compile, or "
            "torch.export within this process"
        )
    if _has_transforms():
        return any(kind == _functorch.TransformType.Functionalize for kind in _transforms())
    return has_modes() or (x is not None and type(x) not in PLAIN)


def leave_untraced(reason: str) -> Callable[[F], F]:
    """Decorate a function that torch.compile leaves as it is, with what it calls.

    Unlike ``torch.compiler.disable``, this imports no compiler, and does not wrap the function.
    It decorates the function itself, not another decorator's: those share their code.

    Args:
        reason: text of the error under ``fullgraph=True``.
    """

    def decorate(function: F) -> F:
        vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        eval_frame.set_code_exec_strategy(function.__code__, _AS_IT_IS)
        return function

    return decorate


def has_modes() -> bool:
    """Return whether a dispatch mode is active that may record or replace operations."""
    modes = _count_modes()
    return (modes > 0 and modes > _thread.watching_modes) or _is_included(_EARLY)


def is_eager(*inputs: torch.Tensor | None) -> bool:
    """Return whether only reverse mode is active, so that a node may have a custom backward.

    Otherwise a composition of operators is required: under torch.compile, forward mode, torch.func,
    dispatch modes, or if an input is a tensor subclass with its own operations.
    """
    # On the path of every call, so it calls nothing of ours that does not matter.
    if is_dynamo_compiling() or _has_transforms() or forward_ad._current_level >= 0:  # pyright: ignore
        return False
    may_record = _count_modes() > 0 or _is_included(_EARLY) or _script_tracer() is not None
    if may_record and is_recorded():
        return False
    for x in inputs:  # noqa: SIM110
        if x is not None and type(x) not in PLAIN:
            return False
    return True


def is_immediate(*inputs: torch.Tensor) -> bool:
    """Return whether operations run now, and only reverse mode is active.

    Other than for :func:`is_eager`, dispatch modes that record no graph may watch the operations,
    as torch's counter of FLOPs does. Gradients follow the same rules; movements are operations of
    this library.
    """
    if is_eager(*inputs):
        return True
    if not has_modes() or is_traced() or _has_transforms() or forward_ad._current_level >= 0:  # pyright: ignore
        return False
    return all([type(x) in PLAIN for x in inputs])


class Watching(TorchDispatchMode):
    """Dispatch mode that observes operations during eager execution without recording them."""

    def __enter__(self) -> Any:
        _thread.watching_modes += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _thread.watching_modes -= 1


def is_compiled() -> bool:
    """Return whether torch.compile is tracing, or running untraced code that binds for it."""
    return is_dynamo_compiling() or _thread.binds_for_compiler


@contextmanager
def binding_for_compiler() -> Generator[None, None, None]:
    """Mark that movements bound in the body are for a graph of torch.compile."""
    _thread.binds_for_compiler = True
    try:
        yield
    finally:
        _thread.binds_for_compiler = False


def is_traced() -> bool:
    """Return whether a graph is being traced, by torch.compile or with proxy tensors."""
    if is_dynamo_compiling() or _private._get_dispatch_mode(_PROXY) is not None:
        return True
    return _is_included(_EARLY) and _early_mode(_PROXY) is not None


def _transforms() -> list[Any]:
    return [interpreter.key() for interpreter in _functorch.get_interpreter_stack() or ()]


def refuse_vmap() -> None:
    """Raise under ``torch.func.vmap``, which could call each worker a different number of times.

    Raises:
        ShapeError: vmap is active, at any level of the transforms.
    """
    if any(kind == _functorch.TransformType.Vmap for kind in _transforms()):
        raise ShapeError(
            "operators cannot run under torch.func.vmap, because nothing can be moved between "
            "workers there: make the batch a dim of the tensor, or loop over its entries"
        )


@contextmanager
def outside_torch() -> Generator[None, None, None]:
    """Disable all transforms and modes in the body: tensors created there have real memory."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def constant_when_traced(function: F) -> F:
    """Decorate a function like ``torch.compiler.assume_constant_result``, for any arguments.

    The decorator does not load the compiler. Some versions of Dynamo (torch 2.11) do not pass
    objects to such a function, but all support ``id`` and guard the graph by it. Objects are
    therefore passed by address; Dynamo keeps them alive during the call.
    """

    def call_by_address(*args: Any, **kwargs: Any) -> Any:
        named = {name: _object_of(*pair) for name, pair in kwargs.items()}
        return function(*[_object_of(*pair) for pair in args], **named)

    vars(call_by_address)["_dynamo_marked_constant"] = True

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            return function(*args, **kwargs)
        named = {name: _address_or_value(value) for name, value in kwargs.items()}
        return call_by_address(*[_address_or_value(value) for value in args], **named)

    return call  # type: ignore[return-value]


def _address_or_value(value: object) -> tuple[bool, object]:
    return (False, value) if isinstance(value, _CONSTANTS) else (True, id(value))


def _object_of(is_address: bool, value: Any) -> Any:
    return ctypes.cast(value, ctypes.py_object).value if is_address else value
