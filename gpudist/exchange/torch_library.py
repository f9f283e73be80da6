"""Movements as operations of torch's dispatcher, for the graphs of torch.compile.

A graph contains tensors and numbers, so it refers to a movement by a number, its handle. Handles
are random, because compiled graphs are cached on disk by their text: a rank or process must never
find a graph of another movement there.

The operations in a graph are ordered: each takes a token that the previous one returned. This
prevents compiler passes from reordering operations, from removing one whose output is unused on
this rank only, and from repeating one in backward.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress, islice
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch._library import simple_registry
from torch._library.autograd import Info, make_autograd_impl
from torch._library.effects import EffectType
from torch.autograd.forward_ad import unpack_dual
from torch.fx.node import has_side_effect

from gpudist.exchange import Movement, all_reduce, carry_out, output_form
from gpudist.exchange.tracing import constant_when_traced

_REMEMBERED = 4096
_ITSELF, _ADJOINT, _ADJOINT_OF_ADJOINT = range(3)

_library = torch.library.Library("gpudist", "DEF")
_things: WeakValueDictionary[int, Any] = WeakValueDictionary()
# A backward pass may outlive the layer whose movements it needs.
_recent: deque[object] = deque(maxlen=_REMEMBERED)

# Token of the last operation in each graph that is being traced.
_tokens: WeakKeyDictionary[object, torch.Tensor] = WeakKeyDictionary()


def handle_of(thing: object) -> int:
    """Return the number by which graphs refer to ``thing``; its last two bits are zero."""
    handle = vars(thing).get("_handle")
    if handle is None or _things.get(handle) is not thing:
        handle = secrets.randbits(60) << 2
        vars(thing)["_handle"] = handle
        _things[handle] = thing
        _recent.append(thing)
    return handle


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
        recorded = _refuse_tangents(
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


def _refuse_tangents(kernel: Callable[..., list[torch.Tensor]], name: str) -> Callable[..., Any]:
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
    needs = ctx.needs_input_grad[1]
    adjoints = [adjoint_of(handle) for handle in compress(ctx.handles, needs)]
    moved = iter(torch.ops.gpudist.move(adjoints, list(compress(gradients, needs)), token))
    return None, [next(moved) if needed else None for needed in needs], None


def _check(
    owner: int, x: torch.Tensor, method: str, numbers: Sequence[int]
) -> Sequence[torch.Tensor]:
    getattr(thing_of(owner), method)(x, *numbers)
    return []


define(
    "move",
    "int[] handles, Tensor[] inputs",
    lambda handles, inputs: carry_out([movement_of(handle) for handle in handles], inputs),
    _fake_move,
    _move_gradients,
    _remember_move,
)
# Not differentiable.
define(
    "all_reduce",
    "int partition, Tensor x, str op",
    lambda partition, x, op: [all_reduce(x, thing_of(partition), op)],
    lambda partition, x, op: [x.new_empty(x.shape)],
)
# Calls a method only for the errors that it raises.
define(
    "check",
    "int owner, Tensor x, str method, int[] numbers",
    _check,
    lambda owner, x, method, numbers: [],
)
