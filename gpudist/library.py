"""Movements as operations of torch's dispatcher, for the graphs that torch.compile makes.

A graph knows tensors and numbers, so a movement enters it as a number, its handle. Handles are
random: compiled graphs are cached on disk by their text, and neither another rank nor another
process may find there a graph that moves something else.

The operations are ordered: each takes a token from the one before. So no pass of the compiler
reorders them, deletes one whose output is unused on this rank alone, or repeats one in backward.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._library.autograd import Info, make_autograd_impl
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from gpudist.exchange import Movement, all_reduce, carry_out
from gpudist.partition import Partition
from gpudist.transport.base import ReduceOp

_REMEMBERED = 4096
_ITSELF, _ADJOINT, _ADJOINT_OF_ADJOINT = range(3)

_library = torch.library.Library("gpudist", "DEF")
_things: WeakValueDictionary[int, Any] = WeakValueDictionary()
# A backward pass may outlive the layer whose movements it needs.
_recent: deque[object] = deque(maxlen=_REMEMBERED)


def handle_of(thing: object) -> int:
    """The number by which a graph knows ``thing``; its last two bits are free."""
    handle = vars(thing).get("_handle")
    if handle is None or _things.get(handle) is not thing:
        handle = secrets.randbits(60) << 2
        vars(thing)["_handle"] = handle
        _things[handle] = thing
        _recent.append(thing)
    return handle


@torch.compiler.assume_constant_result
def handles_of(*things: object) -> tuple[int, ...]:
    """Their handles; while torch.compile traces, a constant of the graph."""
    return tuple(handle_of(thing) for thing in things)


def thing_of(handle: int) -> Any:
    """What ``handle`` was given to."""
    thing = _things.get(handle)
    if thing is None:
        raise RuntimeError(
            f"a compiled graph uses handle {handle}, which belongs to nothing in this process: "
            "compiled graphs cannot be saved, and need their layers to live"
        )
    return thing


def movement_of(handle: int) -> Movement:
    """The movement of a handle, or the adjoint that the last two bits of the handle ask for."""
    movement: Movement = thing_of(handle & ~3)
    which = handle & 3
    return movement if which == _ITSELF else movement.T if which == _ADJOINT else movement.T.T


def adjoint_of(handle: int) -> int:
    """The handle of the adjoint movement."""
    return (handle & ~3) | (_ADJOINT_OF_ADJOINT if handle & 3 == _ADJOINT else _ADJOINT)


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Make an operation ``gpudist::NAME`` that communicates.

    Args:
        schema: ``"NAME(...) -> ..."``; nothing is modified and no output is an input.
        kernel: carries it out.
        fake: makes outputs without cells.
        backward, setup_context: as of ``torch.library.register_autograd``.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gpudist::{name}", fake, lib=_library)
    operation = getattr(torch.ops.gpudist, name).default
    differentiable = make_autograd_impl(operation, Info(backward, setup_context))
    _library.impl(name, _never_repeated(differentiable), "Autograd", with_keyset=True)
    has_side_effect(operation)
    _register_effectful_op(operation, _EffectType.ORDERED)


def _never_repeated(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, but in a region to checkpoint of a graph its results are kept.

    Repeated in backward, it would run only on ranks whose backward needs the result.
    """

    def record(keyset: object, *args: object) -> object:
        mode = get_proxy_mode()
        if mode is None:
            return kernel(keyset, *args)
        nodes = mode.tracer.graph.nodes
        before = len(nodes)
        result = kernel(keyset, *args)
        for node in islice(reversed(nodes), len(nodes) - before):
            if "recompute" in node.meta:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return result

    return record


def _move(
    handles: Sequence[int], inputs: Sequence[torch.Tensor], witness: torch.Tensor | None
) -> list[torch.Tensor]:
    outputs = carry_out([movement_of(handle) for handle in handles], inputs)
    return [*outputs, inputs[0].new_empty(0)]


def _fake_move(
    handles: Sequence[int], inputs: Sequence[torch.Tensor], witness: torch.Tensor | None
) -> list[torch.Tensor]:
    movements = [movement_of(handle) for handle in handles]
    outputs = [
        x.new_empty(movement.output_shape, dtype=movement.output_dtype)
        for movement, x in zip(movements, inputs, strict=True)
    ]
    return [*outputs, inputs[0].new_empty(0)]


def _remember_move(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.handles, tensors, _ = inputs
    # The adjoint takes the witness, so that every rank saves a tensor: checkpointing recomputes
    # when saved tensors are read, on all ranks or on none.
    ctx.save_for_backward(output[-1])
    constant = [y for x, y in zip(tensors, output, strict=False) if not x.requires_grad]
    ctx.mark_non_differentiable(*constant, output[-1])


def _move_gradients(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    (witness,) = ctx.saved_tensors
    needed = [i for i, needs in enumerate(ctx.needs_input_grad[1]) if needs]
    moved = torch.ops.gpudist.move(
        [adjoint_of(ctx.handles[i]) for i in needed], [gradients[i] for i in needed], witness
    )
    results: list[torch.Tensor | None] = [None] * len(ctx.handles)
    for i, gradient in zip(needed, moved, strict=False):
        results[i] = gradient
    return None, results, None


def _all_reduce(partition: int, x: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    P: Partition = thing_of(partition)
    return all_reduce(x, P, op)


def _fake_all_reduce(partition: int, x: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    return x.new_empty(x.shape)


def _check(owner: int, method: str, x: torch.Tensor, numbers: Sequence[int]) -> None:
    getattr(thing_of(owner), method)(x, *numbers)


def _fake_check(owner: int, method: str, x: torch.Tensor, numbers: Sequence[int]) -> None:
    return None


# Outputs are those of the movements, and the witness of the adjoint: a tensor without cells.
define(
    "move(int[] handles, Tensor[] inputs, Tensor? witness) -> Tensor[]",
    _move, _fake_move, _move_gradients, _remember_move,
)  # fmt: skip
# Not differentiable.
define("all_reduce(int partition, Tensor x, str op) -> Tensor", _all_reduce, _fake_all_reduce)
# Calls a method for its errors.
define("check(int owner, str method, Tensor x, int[] numbers) -> ()", _check, _fake_check)
