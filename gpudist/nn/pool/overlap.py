"""Pooling of the own block in place, its boundary apart: no padded copy of the block.

The outputs of a face are pooled once more, from all cells they read, and replace what the own block
gave there; their gradients reach the block through those cells only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.exchange import Movement, add_into, start
from gpudist.nn.pool.local import LocalPool, behind_margin


@dataclass(frozen=True)
class PoolingInPlace:
    """The pooling of a block of one shape.

    Attributes:
        pool: of a tensor of this rank.
        faces: movements of the cells each face reads, own ones too, from the block to a slab; the
            same on all ranks, without cells on a rank that has no such face.
        outputs: where in the output block the outputs of each face are.
        margins: cells of padding in front of each slab, per spatial dim.
        padding: on both sides of the own block.
        composed: the same as a composition of differentiable operators.
    """

    pool: LocalPool
    faces: tuple[Movement, ...]
    outputs: tuple[tuple[slice, ...], ...]
    margins: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...]
    composed: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The own block of the output, as one differentiable node.

        Adjoint:
            That of the pooling; gradients of ghosts are added into the gradient of the cells they
            were copied from.

        Cost:
            One group of messages each way, and in backward a copy of the output's gradient.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            return _PoolInPlace.apply(self, x)  # pyright: ignore
        return self.forward(x)[0]

    @property
    def _none(self) -> tuple[int, ...]:
        return (0,) * len(self.padding)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The output, and the tensors its adjoint needs."""
        started = start(self.faces, (x,) * len(self.faces))
        y, places = self.pool.forward(x, self.padding)
        kept: list[torch.Tensor | None] = [x, places]
        for i, (cells, margin) in enumerate(zip(self.outputs, self.margins, strict=True)):
            slab = started.wait(i)
            places = None
            if slab.numel():
                y[cells], places = self.pool.forward(slab, self._none)
                if places is not None and any(margin):
                    places = behind_margin(places, slab.shape[2:], margin, self.pool.dilation)
            kept += [slab, places]
        return y, kept

    def backward(self, gradient: torch.Tensor, kept: Sequence[Any]) -> torch.Tensor:
        """The gradient of the block."""
        x, places, *faces = kept
        of_own = gradient.clone()
        of_slabs: list[torch.Tensor] = []
        for slab, where, cells in zip(faces[::2], faces[1::2], self.outputs, strict=True):
            if slab.numel():
                of_own[cells] = 0
                slab = self.pool.adjoint(gradient[cells].contiguous(), slab, where, self._none)
            of_slabs.append(slab)
        of_x = self.pool.adjoint(of_own, x, places, self.padding)
        add_into([face.T for face in self.faces], of_slabs, [of_x] * len(of_slabs))
        return of_x


class _PoolInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooling: PoolingInPlace, x: torch.Tensor) -> torch.Tensor:
        y, kept = pooling.forward(x)
        ctx.pooling = pooling
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Before communicating: checkpointing recomputes the forward here.
        kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            x = kept[0]
            y = ctx.pooling.composed(x)
            return None, *torch.autograd.grad(y, x, gradients[0], create_graph=True)
        return None, ctx.pooling.backward(gradients[0], kept)
