"""Attention by heads: an all-to-all to whole sequences of some heads, and one back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import move
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.layout import Layout, Sbp, broadcast, split
from gpudist.geometry.routes import plan
from gpudist.nn.autocast import product_dtype
from gpudist.world.partition import Partition, cache_in_world


def attend_by_heads(
    line: Partition,
    cuts: tuple[Blocks, Blocks],
    groups: int,
    tensors: Sequence[Tensor],
    attend: Callable[..., Tensor],
) -> Tensor:
    """Compute attention of sequences that are split over workers, each of which gets some heads.

    The key heads are split in balanced blocks, and the query heads with them. Collective over
    ``line``.

    Args:
        line: workers that share the sequences.
        cuts: blocks of queries and of keys over these workers.
        groups: number of query heads that share a key head.
        tensors: this worker's blocks of query, key and value, ``[..., H, S, D]``, and optionally of
            the padding of the keys, ``[B, S]``.
        attend: computes the attention of the same tensors with whole sequences.

    Returns:
        This worker's block of the output, ``[..., H, S_q, D_v]``.

    Adjoint:
        The two exchanges in reverse.

    Cost:
        Two all-to-all, in which each worker of ``p`` sends ``(p - 1) / p`` of its blocks; under
        autocast in the dtype of its products.
    """
    dtype = product_dtype(tensors[0])
    if dtype != tensors[0].dtype:
        tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    blocks = [(x.shape, x.dtype) for x in tensors]
    *to_heads, back = _bind(line, *cuts, groups, *blocks)
    y = attend(*move(to_heads, tensors))
    return move((back,), (y.contiguous(),))[0]


_Block = tuple[torch.Size, torch.dtype]


@cache_in_world
def _bind(
    line: Partition,
    queries: Blocks,
    keys: Blocks,
    groups: int,
    query: _Block,
    key: _Block,
    value: _Block,
    *padding: _Block,
) -> list[Movement]:
    """Bind the movements of all blocks, and that of the output."""
    of_keys = Blocks(key[0][-3], line.size)
    of_queries = Blocks.of_sizes([groups * of_keys.length(i) for i in range(line.size)])

    def swap(shape: Sequence[int], dtype: torch.dtype, sequence: Blocks, heads: Blocks) -> Movement:
        rows = len(shape) - 2
        whole = (*shape[:rows], sequence.extent, shape[-1])
        label = f"all-to-all of {list(whole)} between sequence and heads"
        ends = split(rows, sequence.sizes), split(rows - 1, heads.sizes)
        return _movement(line, label, dtype, whole, *ends)

    label, cut = f"all-gather of the padding of {keys.extent} keys", split(1, keys.sizes)
    return [
        swap(*query, queries, of_queries),
        swap(*key, keys, of_keys),
        swap(*value, keys, of_keys),
        *(
            _movement(line, label, dtype, (shape[0], keys.extent), cut, broadcast)
            for shape, dtype in padding
        ),
        swap((*query[0][:-1], value[0][-1]), query[1], queries, of_queries).T,
    ]


def _movement(
    line: Partition, label: str, dtype: torch.dtype, shape: Sequence[int], before: Sbp, after: Sbp
) -> Movement:
    ranks = tuple(range(line.size))
    source = Layout(ranks, (line.size,), (before,), tuple(shape))
    own_plan = plan(source, source.with_sbp((after,)), line.plan_rank, ranks)
    return bind(own_plan, line, label, dtype, (0,), dtype)
