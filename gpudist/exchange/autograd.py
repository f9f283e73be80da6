"""Differentiable movements: the backward of a movement is its adjoint movement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.autograd import forward_ad

from gpudist.checks.storage import PLAIN
from gpudist.errors import ShapeError
from gpudist.exchange import Movement, all_reduce, carry_out, carry_out_one
from gpudist.exchange.torch_library import handles_of
from gpudist.exchange.tracing import has_modes, is_eager as is_eager, is_recorded, refuse_vmap
from gpudist.transport.base import ReduceOp
from gpudist.world.partition import Partition

_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # pyright: ignore
# ``torch.autograd.graph.increment_version`` of several tensors.
increment_versions: Callable[[Sequence[torch.Tensor]], None]
increment_versions = torch._C._increment_version  # pyright: ignore
# The class between ``autograd.Function`` and its methods of C++.
FunctionBase: type[torch.autograd.Function]
FunctionBase = torch.autograd.function._SingleLevelFunction  # pyright: ignore


def move(movements: Sequence[Movement], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Execute several movements concurrently, as one differentiable node.

    Collective over the partitions of the movements. An output requires grad if and only if
    gradients are enabled and its input or placeholder requires grad.

    Args:
        movements: one movement per input.
        inputs: blocks or zero-volume placeholders; never modified.

    Returns:
        New tensors, one per movement.

    Tangents:
        Forward mode moves the tangents by the same plans, as one more group. If the input of one
        rank has a tangent, the inputs of all ranks must have one, placeholders included.

    Adjoint:
        Adjoint of each movement. Gradients of all inputs that require them move together; every
        rank of the movements must reach its outputs in the same backward pass.

    Cost:
        Cost of the movements; forward, backward and double backward move the same bytes.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108.
    """
    if is_eager(*inputs):
        if torch.is_grad_enabled() and any([x.requires_grad for x in inputs]):
            return apply(_MoveNode, carry_out, tuple(movements), *inputs)
        return carry_out(movements, inputs)
    if is_recorded() or any([type(x) not in PLAIN for x in inputs]):
        return _move_by_library(movements, inputs)
    return apply(_MoveNode, move_without_node, tuple(movements), *inputs)


def move_one(movement: Movement, x: torch.Tensor) -> torch.Tensor:
    """Move one input for which :func:`is_eager` is true; see :func:`move`."""
    if x.requires_grad and torch.is_grad_enabled():
        return apply(_MoveNode, carry_out, (movement,), x)[0]
    return carry_out_one(movement, x)


def move_without_node(
    movements: Sequence[Movement], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Move the inputs without creating an autograd node, for the body of a ``Function``.

    Within the body, torch's transforms are no longer active, but its dispatch modes may be.
    """
    if has_modes() or any([type(x) not in PLAIN for x in inputs]):
        return _move_by_library(movements, inputs)
    return carry_out(movements, inputs)


def _move_by_library(
    movements: Sequence[Movement], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    try:
        *outputs, _ = torch.ops.gpudist.move(handles_of(*movements), inputs, None)
    except (NotImplementedError, TypeError) as error:
        others = sorted({type(x).__qualname__ for x in inputs if type(x) not in PLAIN})
        if not others:
            raise
        raise ShapeError(
            f"{movements[0].label}: a {' or '.join(others)} has no rule for movements between "
            f"workers; pass the plain tensor in it ({error})"
        ) from error
    return tuple(outputs)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call ``function.apply(*args)``, in a third of the time if no torch.func transform is active.

    Transforms need a ``setup_context``, for which torch inspects signatures at every call.
    """
    applied: Any = function
    if _transforms_active():
        refuse_vmap()
    else:
        applied = super(FunctionBase, function)
    return applied.apply(*args)


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return :func:`apply` of ``function`` for calls with :func:`is_eager`, as a method of C++."""
    applied: Any = super(FunctionBase, function)
    return applied.apply


def concatenate(blocks: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return ``torch.cat(blocks, dim)``, whose gradients depend on the graph of each block.

    In torch, the gradient of a block of shape ``(0,)`` is a constant. The ranks that have one would
    then move nothing for it in the next backward pass.
    """
    if blocks[0].dim() > 1:
        return torch.cat([*blocks], dim)
    return torch.cat([x.unsqueeze(0) for x in blocks], 1).squeeze(0)


def has_tangents() -> bool:
    """Return whether forward mode is active."""
    return bool(forward_ad._current_level >= 0)  # pyright: ignore


def all_reduce_constant(x: torch.Tensor, partition: Partition, op: ReduceOp) -> torch.Tensor:
    """Return the element-wise reduction of the members' tensors, without gradient."""
    if not is_recorded():
        if not _transforms_active() and type(x) in PLAIN:
            return all_reduce(x, partition, op)
        refuse_vmap()
    (handle,) = handles_of(partition)
    return torch.ops.gpudist.all_reduce(handle, x, op, None)[0]


class Declared(NamedTuple):
    """A linear map of one tensor, declared to be the adjoint of another one.

    The declared adjoint may differ from the adjoint of the map itself. It then defines the
    gradients of the values: see :mod:`gpudist.nn.parameters.gradient_graph`.

    Attributes:
        name: name of the operator.
        takes, gives: conventions of the gradients of input and output, ``"dual"`` or
            ``"invariant"``.
        P: workers that hold copies or parts of the value.
        map: computes a new tensor, without an autograd node.
    """

    name: str
    takes: Literal["dual", "invariant"]
    gives: Literal["dual", "invariant"]
    P: Partition
    map: Callable[[torch.Tensor], torch.Tensor]


def apply_with_adjoint(x: torch.Tensor, forward: Declared, backward: Declared) -> torch.Tensor:
    """Apply ``forward`` to ``x`` and in double backward, and ``backward`` to the gradient."""
    return apply(_ApplyDeclared, x, forward, backward)


class _ApplyDeclared(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, forward: Declared, backward: Declared) -> torch.Tensor:
        return forward.map(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.declared, ctx.adjoint = inputs
        ctx.save_for_backward(x.new_empty(0))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return apply_with_adjoint(tangents[0], ctx.declared, ctx.adjoint)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _ = ctx.saved_tensors
        return apply_with_adjoint(gradients[0], ctx.adjoint, ctx.declared), None, None


# Tensors that a node has saved, ``None`` for those that it had not.
Saved = Sequence[Any]


class Handwritten(Protocol):
    """Operator of one output with a backward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Sequence[Any]]:
        """Return the output for the inputs, and what else :meth:`backward` needs."""
        ...

    def backward(
        self, gradient: torch.Tensor, inputs: Saved, kept: Saved, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the inputs; those that are not needed may be ``None``."""
        ...

    def compose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output by a composition of differentiable operators."""
        ...


def apply_handwritten(operator: Handwritten, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Return the output of ``operator`` as one node; double backward repeats the composition.

    Requires :func:`is_eager`.
    """
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in inputs]):
        return apply(_ApplyHandwritten, operator, *inputs)
    return operator.forward(*inputs)[0]


def gradients_of_composition(
    operator: Handwritten, inputs: Saved, needs: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients of the composition, which are differentiable again."""
    # Aliases: hooks of the inputs themselves run once, after the gradient of the node.
    aliases = [x.view_as(x) if need else x for x, need in zip(inputs, needs, strict=True)]
    y = operator.compose(*aliases)
    needed = list(compress(aliases, needs))
    gradients = iter(torch.autograd.grad(y, needed, gradient, create_graph=True))
    return [next(gradients) if need else None for need in needs]


class _ApplyHandwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Handwritten, *inputs: torch.Tensor | None) -> torch.Tensor:
        y, kept = operator.forward(*inputs)
        ctx.operator, ctx.count = operator, len(inputs)
        ctx.save_for_backward(*inputs, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Before any message: reading saved tensors may make checkpointing recompute the forward.
        saved = ctx.saved_tensors
        inputs, kept = saved[: ctx.count], saved[ctx.count :]
        needs = ctx.needs_input_grad[1:]
        if not torch.is_grad_enabled():
            return None, *ctx.operator.backward(gradients[0], inputs, kept, needs)
        return None, *gradients_of_composition(ctx.operator, inputs, needs, gradients[0])


class _MoveNode(torch.autograd.Function):
    @staticmethod
    def forward(
        mover: Callable[..., tuple[torch.Tensor, ...]],
        movements: tuple[Movement, ...],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return mover(movements, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.movements = inputs[1]
        # Checkpointing recomputes the forward when saved tensors are read, so every rank must save
        # one.
        ctx.save_for_backward(inputs[2].new_empty(0))
        if has_tangents():
            return
        ctx.mark_non_differentiable(*compress(output, map(not_, ctx.needs_input_grad[2:])))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        present = [x is not None for x in tangents[2:]]
        linear = [movement.T.T for movement in compress(ctx.movements, present)]
        moved = iter(move(linear, [x for x in tangents[2:] if x is not None]))
        return tuple([next(moved) if is_present else None for is_present in present])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        movements: tuple[Movement, ...] = ctx.movements
        needs = ctx.needs_input_grad[2:]
        adjoints = tuple(map(attrgetter("T"), compress(movements, needs)))
        moved = iter(move(adjoints, tuple(compress(gradients, needs))))
        return None, None, *[next(moved) if needed else None for needed in needs]
