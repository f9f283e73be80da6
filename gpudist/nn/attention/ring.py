"""Attention over a split sequence: blocks of keys and values circulate around a ring of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpudist.checks.arguments import checked
from gpudist.exchange import InFlight, Movement, bind, start
from gpudist.exchange.autograd import apply_handwritten, is_eager, move
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.ring import held_block, plan_ring_hop
from gpudist.nn.attention.blockwise import AttentionSums, BlockAttention, Range
from gpudist.nn.attention.sequence_attention import Cuts, SequenceAttention
from gpudist.ops.operator import cached_operator
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition

# Key, value and optional padding that a worker holds at one step.
Held = tuple[torch.Tensor, ...]


class RingAttention(SequenceAttention):
    """Attention by ring exchange: workers keep their queries, and pass keys and values around.

    At every step, a worker sends the block it holds to the next worker along axis 2, and meanwhile
    adds the contribution of that block to its result with a running softmax.

    Args:
        P_x: partition of queries, keys, values and output, with 4 axes, the last one of extent 1.
            Workers along axis 2 share one sequence; blocks may be uneven or empty.
        is_causal, scale: as in torch's ``scaled_dot_product_attention``.
        dropout_p: probability of dropping an attention weight in training; the dropped weights are
            the same under every partition.
        seed: seed of the dropout; see :class:`~gpudist.nn.DistributedDropout`.
        shape: ``"dynamic"`` makes the ranks agree on the blocks at every call.

    Adjoint:
        The ring exchange in reverse: blocks are sent once more together with their gradients, to
        which each worker adds its contribution. Double backward goes through a composition of
        movements, which keeps all blocks.

    Cost:
        With ``p`` workers along the axis, ``p - 1`` messages of one block of keys and values; in
        backward, as many messages with a block and its gradient. Messages are in flight while the
        products are computed. No worker holds more than two blocks of keys and values, and the
        scores of one. A causal mask skips products but not messages: the last worker computes all
        products.

    Source:
        Liu, Zaharia and Abbeel 2023, arXiv:2310.01889.
    """

    def _attend(
        self,
        block: BlockAttention,
        cuts: Cuts,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        held = (key, value) if padding is None else (key, value, padding)
        rank = self._P_line.rank
        assert rank is not None
        ring = _Ring(block, cuts.keys, rank, self._hops_of(cuts.keys, held))
        if is_eager(query):
            return apply_handwritten(ring, query, *held)
        return ring.compose(query, *held)

    def _hops_of(self, keys: Blocks, held: Held) -> tuple[tuple[Movement, ...], ...]:
        """Return the cached movements of all hops for tensors like ``held``."""
        signature = keys, tuple((x.shape, x.dtype) for x in held)
        return self._movements.get_or_make(
            signature,
            lambda: tuple(
                tuple(
                    self._bind_hop(keys, x, dim, step)
                    for x, dim in zip(held, (2, 2, 1), strict=False)
                )
                for step in range(self._P_line.size)
            ),
        )

    def _bind_hop(self, keys: Blocks, x: torch.Tensor, dim: int, step: int) -> Movement:
        line = self._P_line
        plan = plan_ring_hop(keys, dim, x.shape, line.plan_rank, step, (line.digest,))
        label = f"hop {step} of {list(x.shape)} round the ring of {line.size}"
        return bind(plan, line, label, x.dtype, x.shape, x.dtype)


@checked()
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    P_x: CartesianPartition,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    key_padding_mask: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    shape: ShapeMode = "static",
) -> torch.Tensor:
    """Compute attention by ring exchange; see :class:`~gpudist.nn.RingAttention`.

    Collective over the workers along axis 2 of ``P_x``.

    Args:
        query, key, value, key_padding_mask, key_lengths: see the layer's forward.
        P_x, is_causal, scale, shape: see the layer.

    Returns:
        This worker's block of the output, ``[B, H, S_q, D_v]``.
    """
    layer = cached_operator(RingAttention, P_x, (is_causal, scale, 0.0, None, shape))
    return layer(query, key, value, key_padding_mask, key_lengths)


@dataclass(frozen=True)
class _Ring:
    """One call: attention of this worker's queries to all blocks of keys.

    Attributes:
        block: attention of this worker's queries to any block of keys.
        keys: blocks of the keys along the ring.
        rank: rank of this worker in the ring.
        hops: movements of the held tensors, for every hop; the last hop returns each block to its
            owner.
    """

    block: BlockAttention
    keys: Blocks
    rank: int
    hops: tuple[tuple[Movement, ...], ...]

    def forward(
        self, query: torch.Tensor, *held: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the output, and with it the log-sum-exp of the scores of folded rows."""
        rows = self.block.fold(query)
        sums = self.block.nothing_seen(rows, held[1])
        for step, hop in enumerate(self.hops):
            is_last = step + 1 == len(self.hops)
            in_flight = None if is_last else start(hop, held)
            if self.block.sees(self._keys(step)):
                sums = self._add_keys(sums, rows, held, step)
            if in_flight is not None:
                held = _wait_for_all(in_flight, held)
        result, logarithm = self.block.finish(sums)
        output = self.block.unfold(result).to(query.dtype)
        return output, (output, logarithm)

    def compose(self, query: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
        """Compute the output by a composition of differentiable operators.

        The composition skips no product, because a worker that did not use the output of a movement
        would not run that movement's backward.
        """
        rows = self.block.fold(query)
        sums = self.block.nothing_seen(rows, held[1])
        for step in range(len(self.hops)):
            if step:
                held = move(self.hops[step - 1], held)
            sums = self._add_keys(sums, rows, held, step)
        return self.block.unfold(self.block.finish(sums)[0]).to(query.dtype)

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key and value; steps run from the last to the first."""
        (query, *own_block), (output, logarithm) = inputs, kept
        held: Held = tuple(own_block)
        rows, wide = self.block.fold(query), self.block.fold(gradient).to(logarithm.dtype)
        # Gradient with respect to the logarithm, which also depends on the scores.
        of_logarithm = -(wide * self.block.fold(output)).sum(-1, keepdim=True)
        constants = rows, logarithm, (wide, of_logarithm)
        last = len(self.hops) - 1
        coming = self._start_back(last, held)
        of_rows, of_own = self._gradients(0, held, *constants)
        going: InFlight | None = None
        for step in range(last, 0, -1):
            held = _wait_for_all(coming, held)
            coming = self._start_back(step - 1, held) if step > 1 else coming
            part, of_held = self._gradients(step, held, *constants)
            of_rows = of_rows + part
            if going is not None:
                of_held = _sums(of_held, _wait_for_all(going, of_held))
            going = start([movement.T for movement in self.hops[step - 1][:2]], of_held)
        assert going is not None
        of_padding = (None,) * (len(inputs) - 3)
        return self.block.unfold(of_rows), *_sums(of_own, _wait_for_all(going, of_own)), *of_padding

    def _start_back(self, hop: int, held: Held) -> InFlight:
        return start([movement.T for movement in self.hops[hop]], held)

    def _keys(self, step: int) -> Range:
        return self.keys.block(held_block(self.rank, step, self.keys.parts))

    def _add_keys(
        self, sums: AttentionSums, rows: torch.Tensor, held: Held, step: int
    ) -> AttentionSums:
        key, value, padding = (*held, None)[:3]
        assert key is not None and value is not None
        return self.block.add(sums, rows, key, value, padding, self._keys(step))

    def _gradients(
        self,
        step: int,
        held: Held,
        rows: torch.Tensor,
        logarithm: torch.Tensor,
        cotangents: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, Held]:
        """Return the contribution of one step to the gradients of rows, key and value."""
        key, value, padding = (*held, None)[:3]
        assert key is not None and value is not None
        keys = self._keys(step)
        if not self.block.sees(keys):
            return torch.zeros_like(rows), (torch.zeros_like(key), torch.zeros_like(value))
        of_rows, *of_held = self.block.gradients(
            rows, key, value, padding, keys, logarithm, cotangents
        )
        return of_rows, tuple(of_held)


def _wait_for_all(in_flight: InFlight, like: Sequence[torch.Tensor]) -> Held:
    return tuple(in_flight.wait(i) for i in range(len(like)))


def _sums(first: Held, second: Held) -> Held:
    return tuple(a + b for a, b in zip(first, second, strict=True))
