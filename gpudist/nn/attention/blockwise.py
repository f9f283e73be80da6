"""Attention of a block of queries to blocks of keys, processed one after the other.

The rows of all query heads that share a key head are stored next to each other, so that blocks are
plain matrices: queries ``[B, key heads, rows, D]``, keys ``[B, key heads, keys, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, NamedTuple

import torch

from gpudist.geometry.boxes import Box
from gpudist.nn.random.cells import Cells, Key, draw_kept
from gpudist.nn.random.dropout import DistributedDropout

Range = tuple[int, int]

# Softmax whose result is 0 where all numbers are minus infinity, as in torch's attention.
safe_softmax: Any = torch.ops.aten._safe_softmax


class AttentionSums(NamedTuple):
    """Running sums of each query row over the keys seen so far.

    Attributes:
        weighted: sum of the values, each times ``exp(score - largest)``.
        total: sum of these exponentials, ``[..., 1]``.
        largest: largest score so far, ``[..., 1]``; a constant on which results do not depend.
    """

    weighted: torch.Tensor
    total: torch.Tensor
    largest: torch.Tensor


@dataclass(frozen=True)
class Drops:
    """Weights that one call of a layer drops; see :class:`~gpudist.nn.DistributedDropout`.

    Attributes:
        key: seed and number of the call.
        cells: global indices of the block of queries.
        p: probability of dropping a weight.
    """

    key: Key
    cells: Cells
    p: float

    def factors(
        self, keys: Range, key_count: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return 0 or ``1 / (1 - p)`` for each weight of the block, ``[B, H, queries, keys]``."""
        box, shape = self.cells
        of_keys = Box((*box.start[:3], keys[0]), (*box.stop[:3], keys[1]))
        kept = draw_kept(self.key, Cells(of_keys, (*shape[:3], key_count)), self.p, device)
        return kept.to(dtype).div_(1 - self.p)

    def of_heads(self, queries: Range, heads: Sequence[int]) -> Drops:
        """Return the dropped weights of other queries, and of some of these heads, by number."""
        box, shape = self.cells
        first, start, stop = box.start[1], list(box.start), list(box.stop)
        start[1:3] = first + heads[0], queries[0]
        stop[1:3] = first + heads[1], queries[1]
        return replace(self, cells=Cells(Box(tuple(start), tuple(stop)), shape))


class AttentionDropout(DistributedDropout):
    """Dropout of attention weights by index: query, key, head and batch entry."""

    def drops(self, query: torch.Tensor) -> Drops | None:
        """Return the dropped weights of the next call, or ``None``; collective at first."""
        if not self.training or self.p == 0:
            return None
        if not self.P_x.active:
            self._number()
            return None
        key, cells = self._draw(query)
        assert isinstance(key.seed, torch.Tensor)
        return Drops(key._replace(seed=key.seed.clone()), cells, self.p)


@dataclass(frozen=True)
class BlockAttention:
    """Attention of one block of queries to any block of keys.

    Attributes:
        queries: global range of the block.
        key_count: number of keys in all blocks.
        groups: number of query heads that share a key head.
        is_causal: whether a query attends only to keys up to its own index.
        scale: factor of the scores.
        drops: dropped weights; ``None`` if nothing is dropped.
    """

    queries: Range
    key_count: int
    groups: int
    is_causal: bool
    scale: float
    drops: Drops | None = None

    def sees(self, keys: Range) -> bool:
        """Return whether any query of the block attends to any key of the range ``keys``."""
        if keys[0] >= keys[1] or self.queries[0] >= self.queries[1]:
            return False
        return not self.is_causal or keys[0] < self.queries[1]

    def fold(self, query: torch.Tensor) -> torch.Tensor:
        """Reshape ``[B, H, S, D]`` to rows of the key heads."""
        batch, heads, rows, features = query.shape
        return query.reshape(batch, heads // self.groups, self.groups * rows, features)

    def unfold(self, rows: torch.Tensor) -> torch.Tensor:
        """Reshape rows of the key heads to ``[B, H, S, D]``."""
        batch, heads, count, features = rows.shape
        return rows.reshape(batch, heads * self.groups, count // self.groups, features)

    def nothing_seen(self, query: torch.Tensor, value: torch.Tensor) -> AttentionSums:
        """Return the initial sums of folded queries, before the first block of keys."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        zeros = query.new_zeros((*query.shape[:3], 1), dtype=dtype)
        weighted = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=dtype)
        return AttentionSums(weighted, zeros, torch.full_like(zeros, -torch.inf))

    def add(
        self,
        sums: AttentionSums,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        keys: Range,
    ) -> AttentionSums:
        """Return the sums of folded queries after one more block of keys; differentiable."""
        scores = self._scores(query, key, padding, keys)
        largest = sums.largest
        if scores.shape[-1]:
            largest = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        # A row without keys so far has no largest score to subtract.
        offset = largest.masked_fill(largest == -torch.inf, 0)
        before = (sums.largest - offset).exp()
        weights = (scores - offset).exp()
        weighted = sums.weighted * before + self._weigh_values(weights, value, keys)
        return AttentionSums(weighted, sums.total * before + weights.sum(-1, keepdim=True), largest)

    def finish(self, sums: AttentionSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted mean of the values, and the log-sum-exp of the scores.

        Both are zero for a row that attends to no key.
        """
        is_blind = sums.total == 0
        total = sums.total.masked_fill(is_blind, 1)
        logarithm = total.log() + sums.largest.masked_fill(is_blind, 0)
        return sums.weighted / total, logarithm

    def gradients(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        keys: Range,
        logarithm: torch.Tensor,
        cotangents: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key and value.

        A block of keys contributes to each row's result, and to the sum of the row's weights, which
        is 1 over all blocks.

        Args:
            query: folded queries.
            key, value, padding, keys: tensors and global range of the block of keys.
            logarithm: log-sum-exp over all blocks, from :meth:`finish`; a constant.
            cotangents: gradients of both contributions.
        """
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        with torch.enable_grad():
            weights = (self._scores(query, key, padding, keys) - logarithm).exp()
            parts = self._weigh_values(weights, value, keys), weights.sum(-1, keepdim=True)
        return torch.autograd.grad(parts, (query, key, value), cotangents)

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, padding: torch.Tensor | None, keys: Range
    ) -> torch.Tensor:
        scores = (query * self.scale) @ key.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.is_causal and keys[1] > self.queries[0] + 1:
            rows = torch.arange(*self.queries, device=query.device).repeat(self.groups)
            columns = torch.arange(*keys, device=query.device)
            scores = scores.masked_fill(columns > rows.unsqueeze(-1), -torch.inf)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], -torch.inf)
        return scores

    def _weigh_values(
        self, weights: torch.Tensor, value: torch.Tensor, keys: Range
    ) -> torch.Tensor:
        if self.drops is not None:
            factors = self.drops.factors(keys, self.key_count, weights.dtype, weights.device)
            weights = weights * factors.reshape(weights.shape)
        return (weights.to(value.dtype) @ value).to(weights.dtype)


def attention_scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the scores of all keys for each query, with a mask as in torch's attention."""
    scores = (query * (1 / sqrt(query.shape[-1]))) @ key.transpose(-2, -1)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
