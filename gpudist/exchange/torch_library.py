"""Movements as operations of torch's dispatcher, for the graphs of torch.compile.

A graph contains tensors and numbers, so it refers to a movement by a number, its handle. Handles
are random, because compiled graphs are cached on disk by their text: a rank or process must never
find a graph of another movement there.

The operations in a graph are ordered: each takes a token that the previous one returned. This
prevents compiler passes from reordering operations, from removing one whose output is unused on
this rank only, and from repeating one in backward.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from itertools import islice
from types import FunctionType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._library import simple_registry
from torch._library.autograd import Info, make_autograd_impl
from torch._library.effects import EffectType
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual
from torch.compiler import is_dynamo_compiling
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpudist.checks.storage import PLAIN
from gpudist.errors import ConversionError, GpudistError, ShapeError
from gpudist.exchange import Movement, all_reduce, carry_out, output_form
from gpudist.transport.base import ReduceOp

F = TypeVar("F", bound=Callable[..., Any])

# Types that every supported Dynamo passes as constants.
_CONSTANTS = (
    bool, int, float, str, tuple, list, dict, type, type(None), Enum, FunctionType,
    torch.dtype, torch.device,
)  # fmt: skip

_REMEMBERED = 4096
_ITSELF, _ADJOINT, _ADJOINT_OF_ADJOINT = range(3)

_library = torch.library.Library("gpudist", "DEF")
_things: WeakValueDictionary[int, Any] = WeakValueDictionary()
# A backward pass may outlive the layer whose movements it needs.
_recent: deque[object] = deque(maxlen=_REMEMBERED)

# Token of the last operation in each graph that is being traced.
_tokens: WeakKeyDictionary[object, torch.Tensor] = WeakKeyDictionary()


_private: Any = torch._C
_functorch: Any = _private._functorch
_has_transforms: Callable[[], bool] = _private._are_functorch_transforms_active
_count_modes: Callable[[], int] = _private._len_torch_dispatch_stack
# Torch includes this key while there are modes that record above autograd.
_is_included: Callable[[Any], bool] = _private._dispatch_tls_is_dispatch_key_included
_EARLY = _private.DispatchKey.PreDispatch
_early_mode: Callable[[Any], Any] = torch._ops._get_dispatch_mode_pre_dispatch
_script_tracer: Callable[[], object] = _private._get_tracing_state


class _ThreadState(threading.local):
    """State of the current thread."""

    binds_for_compiler = False
    watching_modes = 0


_thread = _ThreadState()
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


def untraced(reason: str) -> Callable[[F], F]:
    """Decorate a function that torch.compile leaves as it is, with what it calls.

    Args:
        reason: text of the error under ``fullgraph=True``.
    """

    def decorate(call: F) -> F:
        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                # With fullgraph=False, torch then calls this function without tracing it.
                raise ConversionError(reason)
            if get_eval_frame_callback() is not None:
                return torch.compiler.disable(call)(*args, **kwargs)
            return call(*args, **kwargs)

        return cast(F, run)

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


def handle_of(thing: object) -> int:
    """Return the number by which graphs refer to ``thing``; its last two bits are zero."""
    handle = vars(thing).get("_handle")
    if handle is None or _things.get(handle) is not thing:
        handle = secrets.randbits(60) << 2
        vars(thing)["_handle"] = handle
        _things[handle] = thing
        _recent.append(thing)
    return handle


def constant_when_traced(function: F) -> F:
    """Decorate a function like ``torch.compiler.assume_constant_result``, for any arguments.

    The decorator does not load the compiler. Some versions of Dynamo (torch 2.11) do not pass
    objects to such a function, but all support ``id`` and guard the graph by it. Objects are
    therefore passed by address; Dynamo keeps them alive during the call.
    """

    def found(*args: Any, **kwargs: Any) -> Any:
        named = {name: _object_of(*pair) for name, pair in kwargs.items()}
        return function(*[_object_of(*pair) for pair in args], **named)

    vars(found)["_dynamo_marked_constant"] = True

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            return function(*args, **kwargs)
        named = {name: _address_or_value(value) for name, value in kwargs.items()}
        return found(*[_address_or_value(value) for value in args], **named)

    return call  # type: ignore[return-value]


def _address_or_value(value: object) -> tuple[bool, object]:
    return (False, value) if isinstance(value, _CONSTANTS) else (True, id(value))


def _object_of(is_address: bool, value: Any) -> Any:
    return ctypes.cast(value, ctypes.py_object).value if is_address else value


@constant_when_traced
def handles_of(*things: object) -> tuple[int, ...]:
    """Return the handles of ``things``; a constant of the graph while torch.compile traces."""
    return tuple(handle_of(thing) for thing in things)


def thing_of(handle: int) -> Any:
    """Return the object that ``handle`` refers to."""
    thing = _things.get(handle)
    if thing is None:
        raise RuntimeError(
            f"a compiled graph uses handle {handle}, which does not exist in this process: "
            "compiled graphs cannot be saved, and need their layers to stay alive; compile again "
            "in this process"
        )
    return thing


def movement_of(handle: int) -> Movement:
    """Return the movement of a handle, or its adjoint, as selected by the last two bits."""
    movement: Movement = thing_of(handle & ~3)
    which = handle & 3
    return movement if which == _ITSELF else movement.T if which == _ADJOINT else movement.T.T


def adjoint_of(handle: int) -> int:
    """Return the handle of the adjoint movement."""
    return (handle & ~3) | (_ADJOINT_OF_ADJOINT if handle & 3 == _ADJOINT else _ADJOINT)


def define(
    name: str,
    arguments: str,
    kernel: Callable[..., Sequence[torch.Tensor]],
    fake: Callable[..., Sequence[torch.Tensor]],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Define a communicating operation ``gpudist::NAME(ARGUMENTS, Tensor? after) -> Tensor[]``.

    Args:
        name, arguments: name and arguments of the schema; the second argument is a tensor or a list
            of tensors. Inputs are neither modified nor returned.
        kernel: computes the outputs from the arguments without ``after``. A token is appended to
            them: a tensor without cells that the next operation takes as ``after``.
        fake: creates outputs without cells.
        backward, setup_context: see ``torch.library.register_autograd``; without them, the outputs
            are constants for autograd.
    """

    def with_token(make: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Any]:
        def call(*args: Any) -> list[torch.Tensor]:
            x = args[1] if isinstance(args[1], torch.Tensor) else args[1][0]
            return [*make(*args[:-1]), x.new_empty(0)]

        return call

    _library.define(
        f"{name}({arguments}, Tensor? after) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag
    )
    _library.impl(name, with_token(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gpudist::{name}", with_token(fake), lib=_library)
    operation = getattr(torch.ops.gpudist, name).default
    if backward is None:
        recorded = _constant(operation)
    else:
        recorded = _refusing_tangents(
            make_autograd_impl(operation, Info(backward, setup_context)), name
        )
    _library.impl(name, _in_order(recorded), "Autograd", with_keyset=True)
    has_side_effect(operation)
    simple_registry.singleton.find(f"gpudist::{name}").effect.register(EffectType.ORDERED)


def _constant(operation: Any) -> Callable[..., list[torch.Tensor]]:
    def call(keyset: Any, *args: Any) -> list[torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return operation.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return call


def _refusing_tangents(kernel: Callable[..., list[torch.Tensor]], name: str) -> Callable[..., Any]:
    """Wrap ``kernel`` to raise instead of dropping tangents: graphs support reverse mode only."""

    def call(keyset: object, *args: Any) -> list[torch.Tensor]:
        inputs = [args[1]] if isinstance(args[1], torch.Tensor) else args[1]
        if any(unpack_dual(x, level=0).tangent is not None for x in inputs):
            raise NotImplementedError(
                f"gpudist::{name} has no forward mode: use torch.func.jvp and forward_ad outside "
                "torch.compile"
            )
        return kernel(keyset, *args)

    return call


def _in_order(kernel: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Wrap ``kernel`` to keep its order in a graph and never be recomputed.

    Torch has its own tokens for effects, but Inductor drops them (torch 2.13). In checkpointed
    regions the results are saved, because a recomputation in backward would run only on ranks that
    need the result.
    """

    def call(keyset: object, *args: Any) -> list[torch.Tensor]:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
        if mode is None:
            return kernel(keyset, *args)
        # The compiler is already loaded here; importing it at the top of this file would take a
        # second.
        from torch._higher_order_ops.effects import with_effects
        from torch.utils.checkpoint import CheckpointPolicy

        nodes = mode.tracer.graph.nodes
        before = len(nodes)
        outputs = kernel(keyset, *args[:-1], _tokens.get(mode.tracer, args[-1]))
        added = list(islice(reversed(nodes), len(nodes) - before))
        if any(node.target is with_effects for node in added):
            _tokens[mode.tracer] = outputs[-1]
        for node in added:
            if "recompute" in node.meta:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return outputs

    return call


def _move(handles: Sequence[int], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return carry_out([movement_of(handle) for handle in handles], inputs)


def _fake_move(handles: Sequence[int], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    movements = [movement_of(handle) for handle in handles]
    return [
        torch.empty(
            movement.output_shape, dtype=movement.output_dtype, device=x.device,
            memory_format=output_form(movement, x.stride()),
        )
        for movement, x in zip(movements, inputs, strict=True)
    ]  # fmt: skip


def _remember_move(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.handles, tensors, _ = inputs
    # The adjoint takes this token. Saving it on every rank also ensures that checkpointing, which
    # recomputes when saved tensors are read, does so on all ranks or on none.
    ctx.save_for_backward(output[-1])
    constant = [y for x, y in zip(tensors, output, strict=False) if not x.requires_grad]
    ctx.mark_non_differentiable(*constant, output[-1])


def _move_gradients(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    (token,) = ctx.saved_tensors
    needed = [i for i, needs in enumerate(ctx.needs_input_grad[1]) if needs]
    moved = torch.ops.gpudist.move(
        [adjoint_of(ctx.handles[i]) for i in needed], [gradients[i] for i in needed], token
    )
    results: list[torch.Tensor | None] = [None] * len(ctx.handles)
    for i, gradient in zip(needed, moved, strict=False):
        results[i] = gradient
    return None, results, None


def _all_reduce(partition: int, x: torch.Tensor, op: ReduceOp) -> Sequence[torch.Tensor]:
    return [all_reduce(x, thing_of(partition), op)]


def _fake_all_reduce(partition: int, x: torch.Tensor, op: ReduceOp) -> Sequence[torch.Tensor]:
    return [x.new_empty(x.shape)]


def _check(
    owner: int, x: torch.Tensor, method: str, numbers: Sequence[int]
) -> Sequence[torch.Tensor]:
    getattr(thing_of(owner), method)(x, *numbers)
    return []


def _fake_check(
    owner: int, x: torch.Tensor, method: str, numbers: Sequence[int]
) -> Sequence[torch.Tensor]:
    return []


define("move", "int[] handles, Tensor[] inputs", _move, _fake_move, _move_gradients, _remember_move)
# Not differentiable.
define("all_reduce", "int partition, Tensor x, str op", _all_reduce, _fake_all_reduce)
# Calls a method only for the errors that it raises.
define("check", "int owner, Tensor x, str method, int[] numbers", _check, _fake_check)
