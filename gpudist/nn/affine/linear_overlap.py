"""Matrix products block by block, overlapped with the exchange of the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpudist.exchange import InFlight, Movement, start
from gpudist.exchange.autograd import Saved, apply_handwritten, is_eager, move

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BlockProducts:
    """Products of the blocks of a tensor whose dim ``dim`` is split over workers.

    Attributes:
        pieces: for each worker, the movement of its block to all others.
        gather: the same movements as one all-gather.
        rank: rank of this worker.
        dim: dim of the tensor that is split.
        lengths: lengths of the blocks along that dim.
    """

    pieces: tuple[Movement, ...]
    gather: Movement
    rank: int
    dim: int
    lengths: tuple[int, ...]

    def multiply_gathered(
        self, block: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply the linear layer to the gathered blocks, multiplying each as soon as it arrives.

        Adjoint:
            The adjoints of the layer and of the all-gather. Double backward repeats the forward as
            a composition.

        Cost:
            An all-gather, and in backward a sum-scatter, both overlapped with the products.
        """
        operator = _GatheredProduct(self)
        if not is_eager(block):
            return operator.compose(block, weight, bias)
        return apply_handwritten(operator, block, weight, bias)

    def scatter_product(self, whole: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return this worker's block of the summed products, which are sent as they are computed.

        Adjoint, Cost:
            See :meth:`multiply_gathered`, with the directions exchanged.
        """
        operator = _ScatteredProduct(self)
        if not is_eager(whole):
            return operator.compose(whole, weight)
        return apply_handwritten(operator, whole, weight)

    def blocks(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Split a gathered tensor into the blocks of all workers."""
        return list(whole.split(self.lengths, self.dim))

    def multiply_arrivals(
        self, block: torch.Tensor, product: Product
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return all blocks, and the concatenation of their products."""
        none = block.new_empty(0)
        inputs = [block if i == self.rank else none for i in range(len(self.pieces))]
        in_flight = start(self.pieces, inputs)
        blocks, products = list(inputs), list(inputs)
        # The local block first, then rotated order, so that workers do not all wait for the same
        # one.
        for step in range(len(self.pieces)):
            i = (self.rank + step) % len(self.pieces)
            arrived = in_flight.wait(i)
            if step:
                blocks[i] = arrived
            products[i] = product(blocks[i])
        return blocks, torch.cat(products, self.dim)

    def start_sums(
        self, blocks: Sequence[torch.Tensor], product: Product
    ) -> tuple[torch.Tensor, list[InFlight]]:
        """Return the product of the local block, to which arriving products are being added.

        Also returns the movements in flight; wait for them before reading the sum.
        """
        own_sum = blocks[self.rank]
        under_way: list[InFlight] = []
        for i, (piece, block) in enumerate(zip(self.pieces, blocks, strict=True)):
            part = product(block)
            if i == self.rank:
                own_sum = part.contiguous()
                under_way.append(start((piece.T,), (part.new_empty(0),), (own_sum,)))
            else:
                under_way.append(start((piece.T,), (part,)))
        return own_sum, under_way


def _wait(under_way: Sequence[InFlight]) -> None:
    for movement in under_way:
        movement.wait(0)


def _of_weight(gradients: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    pairs = [(g.flatten(0, -2), x.flatten(0, -2)) for g, x in zip(gradients, blocks, strict=True)]
    total = pairs[0][0].T @ pairs[0][1]
    for g, x in pairs[1:]:
        total.addmm_(g.T, x)
    return total


@dataclass(frozen=True)
class _GatheredProduct:
    products: BlockProducts
    name, takes, gives = "linear layer", "dual", "dual"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        blocks, y = self.products.multiply_arrivals(x, lambda block: F.linear(block, weight, bias))
        return y, blocks

    def backward(
        self, gradient: torch.Tensor, inputs: Saved, kept: Saved, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        parts = self.products.blocks(gradient)
        of_x, under_way = None, []
        if needs[0]:
            of_x, under_way = self.products.start_sums(parts, lambda part: part @ inputs[1])
        of_weight = _of_weight(parts, kept) if needs[1] else None
        of_bias = gradient.flatten(0, -2).sum(0) if needs[2] else None
        _wait(under_way)
        return [of_x, of_weight, of_bias]

    def compose(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(move((self.products.gather,), (x,))[0], weight, bias)


@dataclass(frozen=True)
class _ScatteredProduct:
    products: BlockProducts
    name, takes, gives = "linear layer", "dual", "dual"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        parts = self.products.blocks(x)
        y, under_way = self.products.start_sums(parts, lambda part: F.linear(part, weight))
        _wait(under_way)
        return y, ()

    def backward(
        self, gradient: torch.Tensor, inputs: Saved, kept: Saved, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        x, weight = inputs
        gradient = gradient.contiguous()
        parts, of_x = self.products.multiply_arrivals(gradient, lambda part: part @ weight)
        return [of_x, _of_weight(parts, self.products.blocks(x)) if needs[1] else None]

    def compose(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return move((self.products.gather.T,), (F.linear(x, weight),))[0]
