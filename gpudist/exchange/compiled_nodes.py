"""Operators with a backward of their own in the graphs of torch.compile, each as one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from gpudist.exchange.autograd import Handwritten, gradients_of_composition
from gpudist.exchange.torch_library import define, handles_of, thing_of


class InGraph(Handwritten, Protocol):
    """Operator whose inputs and results a graph can describe."""

    @property
    def kept_inputs(self) -> Mapping[int, int]:
        """Number of each input that backward needs, by its number among what is kept."""
        ...

    def like_results(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Return tensors like the output and what else backward needs, of inputs without data."""
        ...


def apply_compiled(operator: InGraph, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Return the output of ``operator``, as one operation of the graph that is being traced.

    Args:
        operator: operator that stays alive as long as the graph.
        inputs: tensors; ``None`` only at the end.
    """
    (handle,) = handles_of(operator)
    return torch.ops.gpudist.by_hand(handle, [x for x in inputs if x is not None], None)[0]


def _forward(handle: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    operator: InGraph = thing_of(handle)
    with torch.no_grad():
        y, kept = operator.forward(*inputs)
    return [y, *_without(operator.kept_inputs, kept)]


def _like_forward(handle: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    operator: InGraph = thing_of(handle)
    y, *kept = operator.like_results(*inputs)
    return [y, *_without(operator.kept_inputs, kept)]


def _without(inputs: Mapping[int, int], kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # An operation returns no input.
    return [x.new_empty(0) if i in inputs else x for i, x in enumerate(kept)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.handle, tensors, _ = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    *tensors, token = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[1])
    if torch.is_grad_enabled():
        inputs = tensors[: ctx.count]
        return (
            None,
            gradients_of_composition(thing_of(ctx.handle), inputs, needs, gradients[0]),
            None,
        )
    operands = [gradients[0], *tensors]
    results = torch.ops.gpudist.by_hand_backward(ctx.handle, operands, ctx.count, needs, token)
    return None, [x if need else None for x, need in zip(results, needs, strict=False)], None


def _gradients(
    handle: int, tensors: Sequence[torch.Tensor], count: int, needs: Sequence[bool]
) -> list[torch.Tensor]:
    operator: InGraph = thing_of(handle)
    gradient, inputs, kept = tensors[0], tensors[1 : 1 + count], list(tensors[1 + count :])
    for i, number in operator.kept_inputs.items():
        kept[i] = inputs[number]
    with torch.no_grad():
        results = operator.backward(gradient, inputs, kept, [*needs, False])
    return [_in_format_of(x, y) for x, y in zip(inputs, results, strict=False)]


def _in_format_of(x: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    # The graph relies on this memory format.
    if gradient is None:
        return x.new_empty(0)
    if gradient.stride() == x.stride():
        return gradient
    return torch.empty_like(x).copy_(gradient)


def _like_gradients(
    handle: int, tensors: Sequence[torch.Tensor], count: int, needs: Sequence[bool]
) -> list[torch.Tensor]:
    pairs = zip(tensors[1 : 1 + count], needs, strict=True)
    return [torch.empty_like(x) if need else x.new_empty(0) for x, need in pairs]


define("by_hand", "int operator, Tensor[] inputs", _forward, _like_forward, _backward, _remember)
define(
    "by_hand_backward", "int operator, Tensor[] tensors, int count, bool[] needs",
    _gradients, _like_gradients,
)  # fmt: skip
