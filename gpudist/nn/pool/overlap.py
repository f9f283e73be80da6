"""Pooling of the local block in place and of its boundary separately, without a padded copy.

The outputs of a face are pooled once more from all cells they read, and replace the outputs pooled
from the local block alone. Their gradients reach the block only through these cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.exchange import Movement, add_into, start
from gpudist.exchange.autograd import apply_handwritten
from gpudist.nn.pool.local import LocalPool, behind_margin


@dataclass(frozen=True)
class PoolingInPlace:
    """In-place pooling of a block, bound to one shape.

    Attributes:
        pool: local pool.
        faces: movements of all cells that each face reads, local ones included, into a slab; all
            ranks have the same faces, and the slab is empty on a rank without that face.
        outputs: slices of the output block with the outputs of each face.
        margins: cells of padding in front of each slab, per spatial dim.
        padding: cells of padding on both sides of the local block, per spatial dim.
        compose: the same pooling as a composition of differentiable operators.
    """

    pool: LocalPool
    faces: tuple[Movement, ...]
    outputs: tuple[tuple[slice, ...], ...]
    margins: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...]
    compose: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the local block of the output, as a single differentiable node.

        Adjoint:
            The adjoint of the pooling; gradients of ghosts are added to the gradient of the cells
            they were copied from.

        Cost:
            One group of messages in forward and in backward; backward also copies the gradient of
            the output.
        """
        return apply_handwritten(self, x)

    @property
    def _none(self) -> tuple[int, ...]:
        return (0,) * len(self.padding)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return the output, and the indices and slabs that its adjoint needs."""
        started = start(self.faces, (x,) * len(self.faces))
        y, places = self.pool.forward(x, self.padding)
        kept = [places]
        for i, (cells, margin) in enumerate(zip(self.outputs, self.margins, strict=True)):
            slab = started.wait(i)
            places = None
            if slab.numel():
                y[cells], places = self.pool.forward(slab, self._none)
                if places is not None and any(margin):
                    places = behind_margin(places, slab.shape[2:], margin, self.pool.dilation)
            kept += [slab, places]
        return y, kept

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[Any],
        needs: Sequence[bool],
    ) -> list[torch.Tensor]:
        """Return the gradient of the block."""
        x, places, *faces = *inputs, *kept
        of_own = gradient.clone()
        of_slabs: list[torch.Tensor] = []
        for slab, where, cells in zip(faces[::2], faces[1::2], self.outputs, strict=True):
            if slab.numel():
                of_own[cells] = 0
                slab = self.pool.adjoint(gradient[cells].contiguous(), slab, where, self._none)
            of_slabs.append(slab)
        of_x = self.pool.adjoint(of_own, x, places, self.padding)
        add_into([face.T for face in self.faces], of_slabs, [of_x] * len(of_slabs))
        return [of_x]
