"""Convolution of the local block in place and of its ghosts separately, without a padded copy.

Convolution is linear. Convolving the block with zeros beyond its cells gives every output except
for the contribution of the ghosts. Only the outputs of a face read ghosts, so slabs of ghosts are
convolved separately and added there. Their gradients are computed and sent first; the block's are
computed while these messages are under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpudist.exchange import Movement, output_form, start
from gpudist.exchange.autograd import Saved
from gpudist.geometry.boxes import Box, intersection, without
from gpudist.geometry.faces import from_strip
from gpudist.nn.affine.block_copy import BlockCopy, Convolution, bind_block_copy
from gpudist.nn.affine.local_conv import LocalConvolution
from gpudist.nn.parameters.parameter_layer import adjoints_of, move_gradients
from gpudist.nn.windowed.block_in_place import BlockInPlace


@dataclass(frozen=True, eq=False)
class ConvolutionInPlace:
    """In-place convolution of a block, bound to one shape.

    Attributes:
        faces: movements of each face's ghosts into a slab; all ranks have the same faces, and the
            slab is empty on a rank without that face.
        outputs: slices of the output block that each face contributes to.
        strips: for each face, the own cells that others read, and the movement of slabs' gradients
            to a tensor of these cells.
        parameters: movements of the weight and, if there is one, of the bias; ``None`` for a
            parameter that is already local.
        of_own: convolution of the block, with zeros beyond its cells.
        in_training: whether it is also faster with gradients.
        copy: copy of the block beside its ghosts, for one gradient of the weight; ``None`` if the
            gradients of the slabs are added instead, which are thin: kernels of GPUs are slow then.
        compose: the same convolution as a composition of differentiable operators.
    """

    faces: tuple[Movement, ...]
    outputs: tuple[tuple[slice, ...], ...]
    strips: tuple[tuple[Box, Movement], ...]
    parameters: tuple[Movement | None, ...]
    of_own: LocalConvolution
    in_training: bool
    copy: BlockCopy | None
    compose: Convolution

    @property
    def of_slab(self) -> LocalConvolution:
        """Convolution without zeros beyond the cells."""
        return replace(self.of_own, padding=(0,) * len(self.of_own.padding))

    @property
    def kept_inputs(self) -> Mapping[int, int]:
        """Whether the weight that backward needs is the input."""
        return {} if any(self.parameters) else {0: 1}

    def like_results(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return tensors like the results of :meth:`forward`."""
        operands = [weight] if bias is None else [weight, bias]
        weight, *biases = [
            operands if m is None else operands.new_empty(m.output_shape)
            for m, operands in zip((*self.parameters, None, None), operands, strict=False)
        ]
        slabs = [
            torch.empty(
                face.output_shape, dtype=x.dtype, device=x.device,
                memory_format=output_form(face, x.stride()),
            )
            for face in self.faces
        ]  # fmt: skip
        return [self.of_own(x, weight, *biases), weight, *slabs]

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output, and the moved weight and slabs that its adjoint needs.

        One group of messages carries the ghosts, and one before it the parameters that move, so
        that the block is convolved without waiting for ghosts.
        """
        moving = [m for m in self.parameters if m is not None]
        moved = start(moving, [weight, bias][: len(moving)]) if moving else None
        started = start(self.faces, (x,) * len(self.faces))
        if moved is not None:
            weight = moved.wait(0)
            bias = moved.wait(1) if bias is not None else None
        y = self.of_own(x, weight, bias)
        slabs = [started.wait(i) for i in range(len(self.faces))]
        for slab, cells in zip(slabs, self.outputs, strict=True):
            if slab.numel():
                y[cells].add_(self.of_slab(slab, weight))
        return y, [weight, *slabs]

    def backward(
        self, gradient: torch.Tensor, inputs: Saved, kept: Saved, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the block, the weight and the bias; ``None`` if not needed.

        Gradients of slabs are under way while the block's are computed, and then added to the cells
        that the slabs were copied from; those of parameters follow.
        """
        x, (weight, *slabs) = inputs[0], kept
        apart = needs[0], needs[1] and self.copy is None
        of_slabs, parts = list(slabs), []
        for i, (slab, cells) in enumerate(zip(slabs, self.outputs, strict=True)):
            if slab.numel() and any(apart):
                of_slab, part = self.of_slab.gradients(gradient[cells], slab, weight, apart)
                of_slabs[i] = slab if of_slab is None else of_slab
                parts.append(part)
        adjoints = [adjoint for _, adjoint in self.strips]
        started = start(adjoints, of_slabs) if needs[0] else None
        of_x, of_weight = self._of_block(gradient, x, slabs, weight, needs)
        if apart[1]:
            for part in parts:
                of_weight.add_(part)
        if started is not None:
            for i, (strip, _) in enumerate(self.strips):
                of_strip = started.wait(i)
                if strip.volume:
                    of_x[strip.slices].add_(of_strip)
        of_bias = gradient.sum((0, *range(2, gradient.dim()))) if needs[2] else None
        return [of_x, *move_gradients(adjoints_of(self.parameters), (of_weight, of_bias))]

    def _of_block(
        self, gradient: torch.Tensor, x: torch.Tensor, slabs: Saved, weight: Any, needs: Saved
    ) -> Any:
        if not any(needs[:2]):
            return None, None
        if self.copy is None or not needs[1]:
            return self.of_own.gradients(gradient, x, weight, needs)
        copy = self.copy(x, slabs)
        of_copy, of_weight = self.of_slab.gradients(gradient, copy, weight, needs)
        return None if of_copy is None else of_copy[self.copy.own.slices], of_weight


def bind_in_place(
    use: BlockInPlace,
    parameters: tuple[Movement | None, ...],
    convolution: LocalConvolution,
    compose: Convolution,
    copies: bool,
) -> ConvolutionInPlace:
    """Bind the convolution.

    Args:
        use: plan for using the block in place.
        parameters, compose: see :class:`ConvolutionInPlace`.
        convolution: convolution of the block, with the padding of ``use``.
        copies: whether the gradient of the weight is computed from a copy.
    """
    strips: list[tuple[Box, Movement]] = []
    for face in use.faces:
        stage, P = face.stages[0]
        stage, strip = from_strip(stage)
        # It keeps the identity of the face, since it sends the same messages.
        strip_movement = replace(face, stages=((stage, P),), input_shape=strip.shape, fill=0.0)
        strips.append((strip, strip_movement.T))
    return ConvolutionInPlace(
        use.faces,
        tuple((slice(None), slice(None), *cells[2:]) for cells in use.outputs),
        tuple(strips),
        parameters,
        convolution,
        use.in_training,
        _copy(use) if copies else None,
        compose,
    )


def _copy(use: BlockInPlace) -> BlockCopy:
    face = use.faces[0]
    widths = (0, 0, *use.padding)
    shape = [n + 2 * w for n, w in zip(face.input_shape, widths, strict=True)]
    own_box = Box.whole(face.input_shape).relative_to([-w for w in widths])
    covered, ghosts = [own_box], list[tuple[int, Box, Box]]()
    for i, planned in enumerate(use.planned):
        place = planned.reads.relative_to([-w for w in widths])
        rest = [place] if place.volume else []
        for box in covered:
            rest = [piece for part in rest for piece in without(part, box)]
        ghosts += [(i, box.relative_to(place.start), box) for box in rest]
        covered += rest
    assert all(intersection(Box.whole(shape), box) == box for box in covered)
    return bind_block_copy(face.stages[0][1], face.dtype, own_box, shape, ghosts)
