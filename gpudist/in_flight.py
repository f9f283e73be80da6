"""Movements begun before their outputs are needed, and movements into tensors that exist."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, carry_out

_NARROW = (torch.float16, torch.bfloat16)


class InFlight:
    """Movements under way."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = outputs

    def wait(self, i: int) -> torch.Tensor:
        """The output of movement ``i``, complete."""
        return self._outputs[i]


def start(movements: Sequence[Movement], inputs: Sequence[torch.Tensor]) -> InFlight:
    """Begin to move every input along its movement, which has one stage; inputs must not change.

    Collective like :func:`carry_out`, which it does at once.
    """
    return InFlight(carry_out(movements, inputs))


def add_into(
    movements: Sequence[Movement],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """Like :func:`carry_out`, for movements of one stage, but adds to the outputs there are.

    Args:
        movements, inputs: as there.
        outputs: per movement, the tensor to add to, in place, or ``None`` for a new one. Several
            movements may add to the same one. Not of a 16-bit dtype, whose sums need more bits.
    """
    for movement, output in zip(movements, outputs, strict=True):
        if output is not None and (
            output.shape != movement.output_shape
            or output.dtype != movement.dtype
            or output.dtype in _NARROW
            or len(movement.steps) != 1
        ):
            raise ShapeError(
                f"{movement.label}: cannot be added to a {output.dtype} tensor of shape "
                f"{list(output.shape)}; it has {len(movement.steps)} stages and gives "
                f"{movement.dtype} of shape {list(movement.output_shape)}"
            )
    return carry_out(movements, inputs, outputs)
