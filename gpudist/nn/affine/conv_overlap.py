"""Convolution of the local block in place and of its ghosts separately, without a padded copy.

Convolution is linear. Convolving the block with zeros beyond its cells gives every output except
for the contribution of the ghosts. Only the outputs of a face read ghosts, so slabs of ghosts are
convolved separately and added there. The adjoint adds the slabs' gradients to the block's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.exchange import Movement, add_into, start
from gpudist.exchange.autograd import apply_handwritten
from gpudist.nn.affine.local_conv import LocalConvolution

Convolution = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass(frozen=True)
class ConvolutionInPlace:
    """In-place convolution of a block, bound to one shape.

    Attributes:
        faces: movements of each face's ghosts into a slab; all ranks have the same faces, and the
            slab is empty on a rank without that face.
        outputs: slices of the output block that each face contributes to.
        parameters: movements of the weight and, if there is one, of the bias; ``None`` for a
            parameter that is already local.
        padding: zeros on both sides of the local block, per dim.
        stride, dilation, groups: as in the torch layer.
        composed: the same convolution as a composition of differentiable operators.
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
        """Return the local block of the output.

        The parameters may be placeholders. The call is a single autograd node; its output requires
        grad if and only if an input does.

        Adjoint:
            The adjoint of the convolution. Gradients of ghosts are added to the gradient of the
            cells they were copied from. Double backward repeats the forward as a composition.

        Cost:
            One group of messages, with ghosts and parameters, in forward and in backward. One
            convolution of the block and one of each slab; backward convolves each slab twice.
        """
        return apply_handwritten(self, x, weight, bias)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output, and the moved weight and slabs that its adjoint needs."""
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
        return y, [weight, *slabs]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[Any],
        kept: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the block, the weight and the bias; ``None`` if not needed."""
        x, (weight, *slabs) = inputs[0], kept
        of_x: Any = None
        of_weight: Any = None
        of_slabs = slabs.copy()
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
