"""Convolution of the own block in place, its boundary apart: no padded copy of the block.

Convolution is linear. With zeros beyond the own cells it gives every output but for what ghosts
add, and only the outputs of a face read ghosts: slabs of ghosts alone are convolved and added
there. The adjoint adds the slabs' gradients into that of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.exchange import Movement, add_into, start
from gpudist.nn.affine.local_conv import LocalConvolution

Convolution = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass(frozen=True)
class ConvolutionInPlace:
    """The convolution of a block of one shape.

    Attributes:
        faces: movements of each face's ghosts, from the block to a slab; the same on all ranks,
            without cells on a rank that has no such face.
        outputs: where in the output block the outputs of each face are.
        parameters: movements of the weight and, if there is one, of the bias; ``None`` for those
            that are there.
        padding: zeros on both sides of the own block.
        stride, dilation, groups: as torch's layer.
        composed: the same as a composition of differentiable operators.
    """

    faces: tuple[Movement, ...]
    outputs: tuple[tuple[slice, ...], ...]
    parameters: tuple[Movement | None, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    composed: Convolution

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The own block of the output, of the own block and parameters or their placeholders.

        One differentiable node; its output requires grad exactly if an input does.

        Adjoint:
            That of the convolution. Gradients of ghosts are added into the gradient of the cells
            they were copied from. Gradients of gradients repeat the forward as a composition.

        Cost:
            Forward and backward each one group of messages: ghosts and parameters. A convolution of
            the block and one of each slab, two of the latter in backward.
        """
        inputs = (x, weight, bias)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            return _ConvolveInPlace.apply(self, *inputs)  # pyright: ignore
        return self.forward(x, weight, bias)[0]

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """The output, and the moved weight and slabs that its adjoint needs."""
        faces = len(self.faces)
        moving = [m for m in self.parameters if m is not None]
        parameters = [weight, bias][: len(moving)]
        started = start((*self.faces, *moving), (*(x,) * faces, *parameters))
        if moving:
            weight = started.wait(faces)
            bias = started.wait(faces + 1) if bias is not None else None
        of_own, of_slab = self._by(self.padding), self._by(_none(self.padding))
        y = of_own(x, weight, bias)
        slabs = [started.wait(i) for i in range(faces)]
        for slab, cells in zip(slabs, self.outputs, strict=True):
            if slab.numel():
                y[cells].add_(of_slab(slab, weight))
        return y, weight, slabs

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        slabs: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Gradients of the block, and of the weight and bias or their placeholders, if needed."""
        of_x: Any = None
        of_weight: Any = None
        of_slabs = list(slabs)
        if needs[0] or needs[1]:
            of_own, of_slab = self._by(self.padding), self._by(_none(self.padding))
            of_x, of_weight = of_own.gradients(gradient, x, weight, needs)
            for i, (slab, cells) in enumerate(zip(slabs, self.outputs, strict=True)):
                if slab.numel():
                    of_slabs[i], part = of_slab.gradients(gradient[cells], slab, weight, needs)
                    if needs[1]:
                        of_weight.add_(part)
        moving: list[tuple[Movement, torch.Tensor, torch.Tensor | None]] = []
        if needs[0]:
            for face, of_slab in zip(self.faces, of_slabs, strict=True):
                moving.append((face.T, of_slab, of_x))
        of_parameters = [of_weight if needs[1] else None, None]
        if needs[2]:
            channel = [d for d in range(gradient.dim()) if d != 1]
            of_parameters[1] = gradient.sum(channel)
        owned: list[int] = []
        for i, movement in enumerate(self.parameters):
            if movement is not None and needs[1 + i]:
                moving.append((movement.T, of_parameters[i], None))
                owned.append(i)
        if moving:
            arrived = add_into(*zip(*moving, strict=True))
            for i, part in zip(owned, arrived[len(moving) - len(owned) :], strict=True):
                of_parameters[i] = part
        return [of_x, *of_parameters]

    def _by(self, padding: tuple[int, ...]) -> LocalConvolution:
        return LocalConvolution(self.stride, padding, self.dilation, self.groups)


def _none(padding: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * len(padding)


class _ConvolveInPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        convolution: ConvolutionInPlace,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        y, moved, slabs = convolution.forward(x, weight, bias)
        ctx.convolution = convolution
        ctx.bias_shape = bias.shape if bias is not None else None
        ctx.save_for_backward(x, weight, moved, *slabs)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Before communicating: checkpointing recomputes the forward here.
        x, weight, moved, *slabs = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx, x, weight, gradients[0])
        return None, *ctx.convolution.backward(gradients[0], x, moved, slabs, needs)


def _differentiable(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients as differentiable functions of the input, the weight and ``gradient``."""
    bias = None
    if ctx.bias_shape is not None:
        # A gradient of a convolution does not depend on the value of its bias.
        bias = x.new_zeros(ctx.bias_shape, requires_grad=ctx.needs_input_grad[3])
    y = ctx.convolution.composed(x, weight, bias)
    all_needs = ctx.needs_input_grad[1:]
    needed: Any = [t for t, needs in zip((x, weight, bias), all_needs, strict=True) if needs]
    found = iter(torch.autograd.grad(y, needed, gradient, create_graph=True))
    return [next(found) if needs else None for needs in all_needs]
