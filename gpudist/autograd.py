"""The one bridge from a movement to torch: its backward is the adjoint movement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.exchange import Movement, carry_out


def move(movements: Sequence[Movement], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Carry out several movements as one differentiable node, all in flight together.

    Collective over the partitions of the movements. An output requires grad exactly if gradients
    are enabled and its input, or the placeholder in its place, requires grad.

    Args:
        movements: one per input.
        inputs: blocks or zero-volume placeholders; never modified.

    Returns:
        New tensors, one per movement.

    Adjoint:
        Each movement's adjoint. Gradients of all inputs that require them move together; every rank
        of the movements must reach its outputs in the same backward pass.

    Cost:
        That of the movements; forward, backward and double backward move the same bytes.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Move.apply(tuple(movements), *inputs)  # pyright: ignore
    return carry_out(movements, inputs)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, movements: tuple[Movement, ...], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.movements = movements
        # Checkpointing recomputes when saved tensors are read: a rank that saved nothing would not.
        ctx.save_for_backward(inputs[0].new_empty(0))
        outputs = carry_out(movements, inputs)
        ctx.mark_non_differentiable(
            *(y for y, needed in zip(outputs, ctx.needs_input_grad[1:], strict=True) if not needed)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        needed = [i for i, needs in enumerate(ctx.needs_input_grad[1:]) if needs]
        moved = move([ctx.movements[i].T for i in needed], [gradients[i] for i in needed])
        results: list[torch.Tensor | None] = [None] * len(gradients)
        for i, gradient in zip(needed, moved, strict=True):
            results[i] = gradient
        return (None, *results)
