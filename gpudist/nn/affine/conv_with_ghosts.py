"""Convolution of a copy of the block beside its ghosts, of which only the ghosts are kept.

The input of the convolution is a copy of the block, whose cells torch keeps for other gradients
already. So only the ghosts are kept, and backward makes the copy again. The gradient of the copy is
the gradient of the block where it lies: ghosts are added into it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gpudist.exchange import Movement, bind, carry_out_one
from gpudist.exchange.autograd import Saved
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box, Move, Plan, Stage, boxes_outside, intersection
from gpudist.geometry.halo import adjoint_in_place, covers_own_cells, needed_range
from gpudist.geometry.windows import Window
from gpudist.nn.affine.local_conv import LocalConvolution
from gpudist.nn.channels_last import channels_last_form, in_form
from gpudist.nn.parameters.parameter_layer import adjoints_of, move_gradients, move_those

Convolution = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]

# Smallest block whose copy is made again. Below, the launches cost more than the memory is worth.
SMALLEST_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class ConvolutionWithGhosts:
    """Convolution of a block and its ghosts, bound to one shape.

    Attributes:
        halo: movement of the block to the copy beside its ghosts.
        adjoint: the adjoint of ``halo`` within the copy, for :func:`add_into`.
        own: the block's cells in the copy.
        ghosts: boxes of the copy that hold ghosts.
        refill: movement of the block to a copy with zeros beside it; no worker sends anything.
        parameters: movements of the weight and, if there is one, of the bias; ``None`` for a
            parameter that is already local.
        convolution: convolution of the copy.
        compose: the same convolution as a composition of differentiable operators.
    """

    halo: Movement
    adjoint: Movement
    own: Box
    ghosts: tuple[Box, ...]
    refill: Movement
    parameters: tuple[Movement | None, ...]
    convolution: LocalConvolution
    compose: Convolution

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output, and the moved weight and ghosts that its adjoint needs.

        Each pass copies the block once. Backward keeps the block, which torch would keep too, and
        the ghosts.
        """
        operands = [x, weight] if bias is None else [x, weight, bias]
        block, weight, *biases = move_those((self.halo, *self.parameters), operands)
        block = in_form(block, channels_last_form(x))
        ghosts = [block[box.slices].clone() for box in self.ghosts]
        return self.convolution(block, weight, *biases), [weight, *ghosts]

    def backward(
        self, gradient: torch.Tensor, inputs: Saved, kept: Saved, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the block, the weight and the bias; ``None`` if not needed.

        The gradient of a contiguous block is a view of the gradient of its copy.
        """
        x, (weight, *ghosts) = inputs[0], kept
        block = self._copy(x, ghosts) if needs[1] else self._unread(x)
        of_block, *gradients = self.convolution.all_gradients(gradient, block, weight, needs)
        in_place = needs[0] and of_block.is_contiguous()
        adjoints = (self.adjoint if in_place else self.halo.T, *adjoints_of(self.parameters))
        gradients = move_gradients(adjoints, (of_block, *gradients), of_block if in_place else None)
        if in_place:
            gradients[0] = of_block[self.own.slices]
        return gradients

    def _copy(self, x: torch.Tensor, ghosts: Saved) -> torch.Tensor:
        copy = in_form(carry_out_one(self.refill, x), channels_last_form(x))
        for ghost, box in zip(ghosts, self.ghosts, strict=True):
            copy[box.slices].copy_(ghost)
        return copy

    def _unread(self, x: torch.Tensor) -> torch.Tensor:
        # Only the shape of the copy is read.
        form = channels_last_form(x) or torch.contiguous_format
        shape = self.halo.output_shape
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)


def bind_with_ghosts(
    halo: Movement,
    inputs: Decomposition,
    windows: Sequence[Window],
    index: Sequence[int],
    parameters: tuple[Movement | None, ...],
    convolution: LocalConvolution,
    compose: Convolution,
) -> ConvolutionWithGhosts | None:
    """Bind the convolution; ``None`` if the copy is kept. Ranks may choose: messages are the same.

    Args:
        halo: halo exchange of the input.
        inputs: decomposition of the input.
        windows: windows of the cells that ``halo`` moves.
        index: index of this worker.
        parameters, convolution, compose: see :class:`ConvolutionWithGhosts`.
    """
    sizes = [max(blocks.lengths) for blocks in inputs.dims]
    if halo.dtype.itemsize * Box.whole(sizes).volume < SMALLEST_BLOCK_BYTES:
        return None
    stage, P = halo.stages[0]
    is_one = len(halo.stages) == 1 and stage.communicates
    if not is_one or not all(map(covers_own_cells, inputs.dims, windows)):
        return None
    along = zip(inputs.dims, windows, index, strict=True)
    start = [blocks.block(i)[0] - needed_range(blocks, w, i)[0] for blocks, w, i in along]
    own_box = Box.whole(halo.input_shape).relative_to([-n for n in start])
    # It keeps the identity of the adjoint of ``halo``, since it sends the same messages.
    adjoint = replace(
        halo.T, stages=((adjoint_in_place(stage, own_box), P),), output_shape=halo.output_shape,
        _forward=None,
    )  # fmt: skip
    filled = [box for message in stage.receives for box in message.boxes]
    filled += [move.destination for move in stage.moves if move.destination != own_box]
    ghosts = tuple(
        box
        for box in boxes_outside(halo.output_shape, [own_box])
        if any(intersection(box, part) for part in filled)
    )
    still = Stage(own_box.shape, halo.output_shape, (Move(Box.whole(own_box.shape), own_box),))
    plan = Plan(("copy of a block", own_box, halo.output_shape), P.plan_rank, (still,))
    label = f"copy of a block of {list(own_box.shape)}"
    refill = bind(plan, P, label, halo.dtype, own_box.shape, halo.dtype)
    given = parameters, convolution, compose
    return ConvolutionWithGhosts(halo, adjoint, own_box, ghosts, refill, *given)
