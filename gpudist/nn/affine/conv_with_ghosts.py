"""Convolution of a copy of the block beside its ghosts, of which only the ghosts are kept.

The input of the convolution is a copy of the block, whose cells torch keeps for other gradients
already. So only the ghosts are kept, and backward makes the copy again. The gradient of the copy is
the gradient of the block where it lies: ghosts are added into it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpudist.exchange import Movement, add_into
from gpudist.exchange.autograd import apply_handwritten, is_eager
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box, intersection, uncovered
from gpudist.geometry.halo import adjoint_in_place, covers_own_cells, needed_range
from gpudist.geometry.windows import Window
from gpudist.nn.affine.local_conv import LocalConvolution
from gpudist.nn.autocast import autocast_is_on, product_dtype
from gpudist.nn.channels_last import channels_last_form, in_form
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.nn.parameters.parameter_layer import move_those

# Smallest block whose copy is made again. Below, the launches cost more than the memory is worth.
SMALLEST_BLOCK_BYTES = 4 << 20

Convolution = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ConvolutionWithGhosts:
    """Convolution of a block and its ghosts, bound to one shape.

    Attributes:
        halo: movement of the block to the copy beside its ghosts.
        adjoint: the adjoint of ``halo`` within the copy, for :func:`add_into`.
        own: the block's cells in the copy.
        ghosts, padding: disjoint boxes of all other cells of the copy, received ones and zeros.
        parameters: movements of the weight and, if there is one, of the bias; ``None`` for a
            parameter that is already local.
        convolution: convolution of the copy.
        composed: the same convolution as a composition of differentiable operators.
    """

    halo: Movement
    adjoint: Movement
    own: Box
    ghosts: tuple[Box, ...]
    padding: tuple[Box, ...]
    parameters: tuple[Movement | None, ...]
    convolution: LocalConvolution
    composed: Convolution

    def fits(self, x: torch.Tensor) -> bool:
        """Return whether this way suits ``x``: with gradients, on a GPU.

        Under autocast, the block must have the dtype of the product, and no parameter may move.
        """
        return (
            torch.is_grad_enabled()
            and not suits_cpu(x)
            and is_eager(x)
            and x.dtype == product_dtype(x)
            and not (autocast_is_on(x.device) and any(self.parameters))
        )

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the local block of the output; the call is a single autograd node.

        Adjoint:
            The adjoint of the composition, in the same messages. The gradient of a contiguous
            block is a view of the gradient of its copy.

        Cost:
            Each pass copies the block once. Backward keeps the block, which torch would keep too,
            and the ghosts.
        """
        if autocast_is_on(x.device):
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return apply_handwritten(self, x, weight, bias)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output, and the moved weight and ghosts that its adjoint needs."""
        given = [x, weight] if bias is None else [x, weight, bias]
        block, weight, *biases = move_those((self.halo, *self.parameters), given)
        block = in_form(block, channels_last_form(x))
        ghosts = [block[box.slices].clone() for box in self.ghosts]
        return self.convolution(block, weight, *biases), [weight, *ghosts]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[Any],
        kept: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the block, the weight and the bias; ``None`` if not needed."""
        x, (weight, *ghosts) = inputs[0], kept
        block = self._beside(x, ghosts, is_read=needs[1])
        of_block, *found = self.convolution.all_gradients(gradient, block, weight, needs)
        moving: list[tuple[Movement, torch.Tensor, torch.Tensor | None]] = []
        in_place = needs[0] and of_block.is_contiguous()
        if needs[0]:
            adjoint = self.adjoint if in_place else self.halo.T
            moving.append((adjoint, of_block, of_block if in_place else None))
        owned: list[int] = []
        for i, movement in enumerate(self.parameters):
            if movement is not None and needs[1 + i]:
                moving.append((movement.T, found[i], None))
                owned.append(i)
        arrived: Sequence[torch.Tensor] = []
        if moving:
            arrived = add_into(*zip(*moving, strict=True))
        for i, part in zip(owned, arrived[len(moving) - len(owned) :], strict=True):
            found[i] = part
        if needs[0]:
            of_block = of_block[self.own.slices] if in_place else arrived[0]
        return [of_block, *found]

    def _beside(self, x: torch.Tensor, ghosts: list[torch.Tensor], is_read: bool) -> torch.Tensor:
        """Return the copy of the block beside its ghosts, or one whose values nobody reads."""
        form = channels_last_form(x) or torch.contiguous_format
        block = torch.empty(
            self.halo.output_shape, dtype=x.dtype, device=x.device, memory_format=form
        )
        if is_read:
            block[self.own.slices].copy_(x)
            for box, cells in zip(self.ghosts, ghosts, strict=True):
                block[box.slices].copy_(cells)
            for box in self.padding:
                block[box.slices].zero_()
        return block


def bind_with_ghosts(
    halo: Movement,
    inputs: Decomposition,
    windows: Sequence[Window],
    index: Sequence[int],
    parameters: tuple[Movement | None, ...],
    convolution: LocalConvolution,
    composed: Convolution,
) -> ConvolutionWithGhosts | None:
    """Bind the convolution; ``None`` if the copy is kept. Ranks may choose: messages are the same.

    Args:
        halo: halo exchange of the input.
        inputs: decomposition of the input.
        windows: windows of the cells that ``halo`` moves.
        index: index of this worker.
        parameters, convolution, composed: see :class:`ConvolutionWithGhosts`.
    """
    sizes = [max(blocks.length(i) for i in range(blocks.parts)) for blocks in inputs.dims]
    if halo.dtype.itemsize * Box.whole(sizes).volume < SMALLEST_BLOCK_BYTES:
        return None
    stage, P = halo.stages[0]
    is_one = len(halo.stages) == 1 and stage.communicates
    if not is_one or not all(map(covers_own_cells, inputs.dims, windows)):
        return None
    along = zip(inputs.dims, windows, index, strict=True)
    start = [blocks.block(i)[0] - needed_range(blocks, w, i)[0] for blocks, w, i in along]
    own = Box.whole(halo.input_shape).shifted([-n for n in start])
    # It keeps the identity of the adjoint of ``halo``, since it sends the same messages.
    adjoint = replace(
        halo.T, stages=((adjoint_in_place(stage, own), P),), output_shape=halo.output_shape,
        _forward=None,
    )  # fmt: skip
    filled = [box for message in stage.receives for box in message.boxes]
    filled += [move.destination for move in stage.moves if move.destination != own]
    ghosts: list[Box] = []
    padding: list[Box] = []
    for box in uncovered(halo.output_shape, [own]):
        (ghosts if any(intersection(box, part) for part in filled) else padding).append(box)
    return ConvolutionWithGhosts(
        halo, adjoint, own, tuple(ghosts), tuple(padding), parameters, convolution, composed
    )
