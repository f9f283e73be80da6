"""Maximum over windows of the block and its ghosts, without keeping their copy for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.exchange import Movement, carry_out
from gpudist.exchange.autograd import apply_handwritten
from gpudist.nn.channels_last import channels_last_form
from gpudist.nn.pool.block import PoolBlock


@dataclass(frozen=True)
class PoolingWithGhosts:
    """Maximum pooling of a block next to its ghosts, bound to one shape.

    Attributes:
        halo: movement of the cells that the pool reads.
        block: pooling of these cells; on no rank does torch compute outputs of another one.
        compose: the same pooling as a composition of differentiable operators.
    """

    halo: Movement
    block: PoolBlock
    compose: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the local block of the output, as a single differentiable node."""
        return apply_handwritten(self, x)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return the output, and the indices of the maxima."""
        y, places = self.block.apply(carry_out((self.halo,), (x,))[0])
        return y, [places]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[Any],
        needs: Sequence[bool],
    ) -> list[torch.Tensor]:
        """Return the gradient of the block."""
        (x,), (places,) = inputs, kept
        form = channels_last_form(x) or torch.contiguous_format
        # The adjoint reads the shape of what was pooled, but no cell.
        pooled = torch.empty(
            self.halo.output_shape, dtype=x.dtype, device=x.device, memory_format=form
        )
        of_pooled = (
            pooled.zero_()
            if places is None
            else self.block.pool.adjoint(gradient, pooled, places, self.block.padding)
        )
        return [*carry_out((self.halo.T,), (of_pooled,))]
