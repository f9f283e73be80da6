"""Attention over a split sequence: an all-to-all to split the heads instead, and one back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpudist.checks.arguments import checked
from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import move
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box, Plan
from gpudist.geometry.repartition import plan_all_gather, plan_repartition
from gpudist.nn.attention.blockwise import BlockAttention, Drops
from gpudist.nn.attention.sequence_attention import Cuts, SequenceAttention, attend_to_all
from gpudist.ops.operator import cached_operator
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


class AllToAllAttention(SequenceAttention):
    """Attention that repartitions from a split sequence to split heads, and back.

    The heads are split over the workers along axis 2 in balanced blocks, so that each worker
    computes whole sequences of some heads. With fewer heads than workers, some workers have none.
    If queries have more heads than keys, query heads that share a key head stay together; where
    that would leave workers without heads, keys and values are repeated first.

    Args:
        P_x: partition of queries, keys, values and output, with 4 axes, the last one of extent 1.
            Workers along axis 2 share one sequence; blocks may be uneven or empty.
        is_causal, scale: as in torch's ``scaled_dot_product_attention``.
        dropout_p: probability of dropping an attention weight in training; the dropped weights are
            the same under every partition.
        seed: seed of the dropout; see :class:`~gpudist.nn.DistributedDropout`.
        shape: ``"dynamic"`` makes the ranks agree on the blocks at every call.

    Adjoint:
        The two exchanges in reverse. Double backward needs a torch kernel that supports it:
        ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.

    Cost:
        With ``p`` workers along the axis, one all-to-all of queries, keys and values together and
        one of the output; each worker sends ``(p - 1) / p`` of its blocks. The products are torch's
        ``scaled_dot_product_attention``, balanced over the workers even with a causal mask.

    Source:
        Jacobs et al. 2023, arXiv:2309.14509.
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
        repeats = _repeats(key.shape[1], block.groups, self._P_line.size)
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        given = (query, key, value) if padding is None else (query, key, value, padding)
        exchange = self._exchange(cuts, given, block.groups // repeats)
        query, key, value, *rest = move(exchange.to_heads, given)
        queries = 0, cuts.queries.extent
        drops = exchange.drops(block.drops, queries)
        whole = replace(block, queries=queries, groups=exchange.groups, drops=drops)
        y = attend_to_all(whole, query, key, value, rest[0] if rest else None)
        return move((exchange.back,), (y.contiguous(),))[0]

    def _exchange(self, cuts: Cuts, given: tuple[torch.Tensor, ...], groups: int) -> _HeadExchange:
        signature = cuts, groups, tuple((x.shape, x.dtype) for x in given)
        return self._movements.made(
            signature, lambda: _HeadExchange.bind(self._P_line, cuts, given, groups)
        )


@checked()
def all_to_all_attention(
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
    """Compute attention over a split sequence; see :class:`~gpudist.nn.AllToAllAttention`.

    Collective over the workers along axis 2 of ``P_x``.

    Args:
        query, key, value, key_padding_mask, key_lengths: see the layer's forward.
        P_x, is_causal, scale, shape: see the layer.

    Returns:
        This worker's block of the output, ``[B, H, S_q, D_v]``.
    """
    layer = cached_operator(AllToAllAttention, P_x, (is_causal, scale, 0.0, None, shape))
    return layer(query, key, value, key_padding_mask, key_lengths)


@dataclass(frozen=True)
class _HeadExchange:
    """Movements of one call.

    Attributes:
        to_heads: movements of query, key, value and, if there is one, padding.
        back: movement of the output.
        heads: range of query heads on this worker, among those of its line of workers.
        groups: number of query heads that share a key head.
    """

    to_heads: tuple[Movement, ...]
    back: Movement
    heads: tuple[int, int]
    groups: int

    @classmethod
    def bind(
        cls, line: CartesianPartition, cuts: Cuts, given: tuple[torch.Tensor, ...], groups: int
    ) -> _HeadExchange:
        query, key, value, *padding = given
        assert line.rank is not None
        of_keys = Blocks(key.shape[1], line.size)
        lengths = [groups * of_keys.length(i) for i in range(line.size)]
        of_queries = Blocks.of_sizes(lengths)
        to_heads = [
            _bind_swap(line, x.shape, heads, sequence, x.dtype)
            for x, heads, sequence in (
                (query, of_queries, cuts.queries),
                (key, of_keys, cuts.keys),
                (value, of_keys, cuts.keys),
            )
        ]
        to_heads += [_bind_gather(line, x, cuts.keys) for x in padding]
        shape = (*query.shape[:3], value.shape[3])
        back = _bind_swap(line, shape, of_queries, cuts.queries, query.dtype).T
        return cls(tuple(to_heads), back, of_queries.block(line.rank), groups)

    def drops(self, drops: Drops | None, queries: tuple[int, int]) -> Drops | None:
        """Return the dropped weights of this worker's heads for complete sequences."""
        if drops is None:
            return None
        first, start, stop = drops.box.start[1], list(drops.box.start), list(drops.box.stop)
        start[1:3] = first + self.heads[0], queries[0]
        stop[1:3] = first + self.heads[1], queries[1]
        return replace(drops, box=Box(tuple(start), tuple(stop)))


def _repeats(key_heads: int, groups: int, workers: int) -> int:
    divisors = [n for n in range(1, groups + 1) if groups % n == 0]
    return next((n for n in divisors if n * key_heads >= workers), groups)


def _bind_swap(
    line: CartesianPartition,
    shape: Sequence[int],
    heads: Blocks,
    sequence: Blocks,
    dtype: torch.dtype,
) -> Movement:
    """Bind the movement from blocks of the sequence to blocks of heads with whole sequences."""
    rank, extents = line.rank or 0, (shape[0], heads.extent, sequence.extent, shape[3])
    batch, all_heads, whole, features = (Blocks(n, 1) for n in extents)
    plan = plan_repartition(
        Decomposition((batch, all_heads, sequence, features)),
        Decomposition((batch, heads, whole, features)),
        rank,
        (0, 0, rank, 0),
        (0, rank, 0, 0),
        lambda index: index[2],
        lambda index: index[1],
        key=(line.digest,),
    )
    return _bound(plan, line, dtype, f"all-to-all of {list(extents)} between sequence and heads")


def _bind_gather(line: CartesianPartition, padding: torch.Tensor, keys: Blocks) -> Movement:
    cut = Decomposition((Blocks(padding.shape[0], 1), keys))
    plan = plan_all_gather(cut, (1,), (0, line.rank or 0))
    return _bound(plan, line, padding.dtype, f"all-gather of the padding of {keys.extent} keys")


def _bound(plan: Plan, line: CartesianPartition, dtype: torch.dtype, label: str) -> Movement:
    shape = plan.input_shape
    assert shape is not None
    return bind(plan, line, label, dtype, shape, dtype)
