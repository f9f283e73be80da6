"""Attention over a split sequence: an all-to-all to split the heads instead, and one back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from gpudist.checks.arguments import checked
from gpudist.geometry.blocks import Blocks
from gpudist.nn.attention.blockwise import BlockAttention
from gpudist.nn.attention.head_exchange import attend_by_heads
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
        line, heads = self._P_line, key.shape[1]
        repeats = _repeats(heads, block.groups, line.size)
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        groups, queries = block.groups // repeats, (0, cuts.queries.extent)
        drops = block.drops
        if drops is not None:
            assert line.rank is not None
            own_heads = Blocks(heads * repeats, line.size).block(line.rank)
            drops = drops.of_heads(queries, [groups * head for head in own_heads])
        whole = replace(block, queries=queries, groups=groups, drops=drops)
        operands = (query, key, value) if padding is None else (query, key, value, padding)
        return attend_by_heads(line, cuts, groups, operands, partial(attend_to_all, whole))


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


def _repeats(key_heads: int, groups: int, workers: int) -> int:
    divisors = [n for n in range(1, groups + 1) if groups % n == 0]
    return next((n for n in divisors if n * key_heads >= workers), groups)
