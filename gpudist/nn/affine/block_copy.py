"""Copy of a block beside its ghosts, made again for a gradient of the weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpudist.exchange import Movement, bind, carry_out_one
from gpudist.geometry.boxes import Box, Move, Plan, Stage
from gpudist.nn.channels_last import channels_last_form, in_form
from gpudist.world.partition import Partition

Convolution = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass(frozen=True, eq=False)
class BlockCopy:
    """Copy of a block beside its ghosts and zeros, bound to one shape.

    Attributes:
        own: the block's cells in the copy.
        movement: movement of the block to the copy, with zeros in all other cells.
        ghosts: number of a tensor with ghosts, a box of it, and the box's place in the copy.
    """

    own: Box
    movement: Movement
    ghosts: tuple[tuple[int, Box, Box], ...]

    def __call__(self, x: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        copy = in_form(carry_out_one(self.movement, x), channels_last_form(x))
        for i, source, place in self.ghosts:
            copy[place.slices].copy_(kept[i][source.slices])
        return copy


def bind_block_copy(
    P_x: Partition,
    dtype: torch.dtype,
    own: Box,
    shape: Sequence[int],
    ghosts: Sequence[tuple[int, Box, Box]],
) -> BlockCopy:
    """Bind the copy of this worker, of the given shape; no worker sends anything."""
    stage = Stage(own.shape, tuple(shape), (Move(Box.whole(own.shape), own),))
    plan = Plan(("copy of a block", own, stage.output_shape), P_x.plan_rank, (stage,))
    label = f"copy of a block of {list(own.shape)}"
    return BlockCopy(own, bind(plan, P_x, label, dtype, own.shape, dtype), tuple(ghosts))
