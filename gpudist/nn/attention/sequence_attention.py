"""Base class of attention layers over a split sequence."""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gpudist.cache import Cache
from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks
from gpudist.nn.attention.blockwise import AttentionDropout, BlockAttention
from gpudist.nn.autocast import in_product_dtype
from gpudist.nn.distributed_module import CheckedModule
from gpudist.nn.partitions import require_axes
from gpudist.ops.bind_cache import BindCache
from gpudist.ops.shape_agreement import ShapeAgreement, ShapeMode, refuse
from gpudist.world.partition import CartesianPartition

SEQUENCE = 2


class Cuts(NamedTuple):
    """Blocks of the query and key sequences over the workers along the axis."""

    queries: Blocks
    keys: Blocks


class SequenceAttention(CheckedModule):
    """Attention ``softmax(scale * Q K^T) V`` of tensors ``[B, H, S, D]`` on ``P_x``.

    Args:
        P_x: partition of queries, keys, values and output, with 4 axes, the last one of extent 1.
            Workers along axis 2 share one sequence; blocks may be uneven or empty.
        is_causal, scale: as in torch's ``scaled_dot_product_attention``.
        dropout_p: probability of dropping an attention weight in training. Dropping depends only on
            the index of the weight, so it is the same under every partition.
        seed: seed of the dropout; see :class:`~gpudist.nn.DistributedDropout`.
        shape: ``"dynamic"`` makes the ranks agree on the blocks at every call.

    Raises:
        PartitionError: ``P_x`` does not have 4 axes with 1 worker along the last.
        ShapeError: ``dropout_p`` is negative, or not below 1.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        *,
        seed: int | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__()
        require_axes(
            self._name,
            P_x,
            P_x.dim == 4 and P_x.shape[3] == 1,
            "axes for batch, heads, sequence and features, with 1 worker along the last",
        )
        self.P_x, self.is_causal, self.scale = P_x, is_causal, scale
        self._P_line = line = P_x.along([SEQUENCE])
        self._query_agreement = ShapeAgreement(self._name, line, line, 4, None, shape)
        self._key_agreement = ShapeAgreement(self._name, line, line, 4, None, shape)
        self._query_cuts = BindCache[Blocks](shape, self._query_agreement)
        self._key_cuts = BindCache[Blocks](shape, self._key_agreement)
        # Movements of the layer's exchange, by the tensors that it moves.
        self._movements = Cache[object, Any](64)
        if not 0 <= dropout_p < 1:
            raise ShapeError(
                f"{self._name}: dropout_p is {dropout_p}; it must be from 0 to below 1"
            )
        self.dropout = None
        if dropout_p > 0:
            self.dropout = AttentionDropout(P_x, dropout_p, seed=seed, shape=shape)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        key_lengths: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        """Return the block of the output for this worker's queries, keys and values.

        Args:
            query: ``[B, H, S_q, D]``.
            key, value: ``[B, H_k, S_k, D]`` and ``[B, H_k, S_k, D_v]``; ``H`` is a multiple of
                ``H_k``, and equal to it if heads are split.
            key_padding_mask: bool tensor ``[B, S_k]``, the block of the same keys; ``True`` hides a
                key from all queries.
            key_lengths: integer tensor ``[B]``, global number of keys per sequence; later keys are
                padding.
            is_causal: overrides the layer's ``is_causal`` for this call.

        Returns:
            Tensor of shape ``[B, H, S_q, D_v]``; zeros for a query that attends to no key. Under
            autocast in its dtype, as torch's.

        Raises:
            ShapeError: the shapes or dtypes of the tensors do not match.
        """
        query, key, value = (in_product_dtype(x) for x in (query, key, value))
        if not self.P_x.active:
            if self.dropout is not None:
                self.dropout.drops(query)
            # Give all inputs a gradient, as on the other workers.
            return query + key.sum() + value.sum()
        self._require(query, key, value, key_padding_mask, key_lengths)
        cuts = Cuts(self._query_cuts(query, self._cut_queries), self._key_cuts(key, self._cut_keys))
        line = self._P_line.rank
        assert line is not None
        padding = _padding(key_padding_mask, key_lengths, cuts.keys.block(line))
        scale = self.scale if self.scale is not None else 1 / sqrt(query.shape[-1])
        block = BlockAttention(
            cuts.queries.block(line),
            cuts.keys.extent,
            query.shape[1] // max(1, key.shape[1]),
            self.is_causal if is_causal is None else is_causal,
            scale,
            self.dropout.drops(query) if self.dropout is not None else None,
        )
        if self._P_line.size == 1:
            return attend_to_all(block, query, key, value, padding)
        return self._attend(block, cuts, query, key, value, padding)

    def _attend(
        self,
        block: BlockAttention,
        cuts: Cuts,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        raise NotImplementedError

    def _cut_queries(self, query: torch.Tensor) -> Blocks:
        return self._query_agreement(query).decomposition.dims[SEQUENCE]

    def _cut_keys(self, key: torch.Tensor) -> Blocks:
        return self._key_agreement(key).decomposition.dims[SEQUENCE]

    def _require(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        lengths: torch.Tensor | None,
    ) -> None:
        shapes = [list(x.shape) for x in (query, key, value)]
        problem = None
        if {len(shape) for shape in shapes} != {4}:
            problem = "query, key and value need dims for batch, heads, sequence and features"
        elif key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3]:
            problem = (
                "key and value must have equal shapes except for features, query and key equal "
                "features"
            )
        elif query.shape[0] != key.shape[0] or query.shape[1] % max(1, key.shape[1]):
            problem = "batches must be equal, and the query's heads a multiple of the key's"
        elif self.P_x.shape[1] > 1 and query.shape[1] != key.shape[1]:
            problem = "heads are split, so query and key must have the same number of heads"
        elif padding is not None and (
            padding.dtype != torch.bool or padding.shape != (key.shape[0], key.shape[2])
        ):
            problem = (
                f"key_padding_mask is {padding.dtype} of shape {list(padding.shape)} but must be "
                f"torch.bool of shape {[key.shape[0], key.shape[2]]}"
            )
        elif lengths is not None and (
            lengths.dtype not in (torch.int32, torch.int64) or lengths.shape != key.shape[:1]
        ):
            problem = (
                f"key_lengths is {lengths.dtype} of shape {list(lengths.shape)} but must be "
                f"torch.int32 or torch.int64 of shape {[key.shape[0]]}"
            )
        elif len({query.dtype, key.dtype, value.dtype}) > 1 or not query.is_floating_point():
            problem = "query, key and value must have the same floating-point dtype"
        if problem is not None:
            refuse(self.P_x, ShapeError(f"{self._name}: {problem}; the blocks are {shapes}"))

    def extra_repr(self) -> str:
        return f"P_x={list(self.P_x.shape)}, is_causal={self.is_causal}, scale={self.scale}"


def _padding(
    mask: torch.Tensor | None, lengths: torch.Tensor | None, keys: tuple[int, int]
) -> torch.Tensor | None:
    if lengths is None:
        return mask
    beyond = torch.arange(*keys, device=lengths.device) >= lengths.unsqueeze(-1)
    return beyond if mask is None else beyond | mask


def attend_to_all(
    block: BlockAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output for complete local sequences, using torch's kernels where possible."""
    if block.drops is not None or 0 in (query.numel(), key.numel(), value.numel()):
        rows = block.fold(query)
        keys = 0, key.shape[SEQUENCE]
        sums = block.add(block.nothing_seen(rows, value), rows, key, value, padding, keys)
        return block.unfold(block.finish(sums)[0]).to(query.dtype)
    options = {"scale": block.scale, "enable_gqa": block.groups > 1}
    if padding is None:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=block.is_causal, **options
        )
    seen = ~padding[:, None, None]
    if block.is_causal:
        seen = seen & query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, seen, **options)
