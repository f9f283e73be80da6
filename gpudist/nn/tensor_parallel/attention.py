"""Self-attention with its heads split over a line of workers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.nn.attention.blockwise import attention_scores, safe_softmax
from gpudist.nn.distributed_module import CheckedModule
from gpudist.nn.random.dropout import DistributedDropout
from gpudist.nn.tensor_parallel.linear import RowParallelLinear
from gpudist.nn.tensor_parallel.qkv import ParallelQKV
from gpudist.nn.tensor_parallel.region import Convention, Lengths
from gpudist.ops.shape_agreement import ShapeMode, refuse
from gpudist.world.partition import Partition


class ParallelAttention(CheckedModule):
    """Multi-head self-attention of ``[L, E]`` or ``[B, L, E]``, with heads split over workers.

    Every worker holds the whole sequence, computes the attention of its heads with
    :func:`torch.nn.functional.scaled_dot_product_attention`, and multiplies by its columns of the
    output projection. The output is the sum of these products. With ``split_sequence``, input and
    output are blocks of the sequence, of the same lengths.

    The parameters are those of four :class:`torch.nn.Linear`, ``qkv.q_proj``, ``qkv.k_proj``,
    ``qkv.v_proj`` and ``out_proj``, initialized in this order. Workers outside ``P`` return a clone
    of their input.

    Args:
        P, embed_dim, num_heads, num_kv_heads, bias, device, dtype, head_dim, axis: see
            :class:`~gpudist.nn.ParallelQKV`; several workers may hold the same key heads, and some
            workers none.
        dropout: probability of dropping an attention weight while training; the same weights are
            dropped on any number of workers.
        seed: seed of dropout; see :class:`~gpudist.nn.DistributedDropout`.
        split_sequence: input and output are blocks of the sequence.
        convention, shape: see :class:`~gpudist.nn.ColumnParallelLinear`.

    Cost:
        See :class:`~gpudist.nn.ParallelQKV` and :class:`~gpudist.nn.RowParallelLinear`. With
        dropout, the attention weights are stored: ``L * L`` numbers per head.

    Raises:
        ShapeError: the heads, the input or the mask do not fit.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053.
    """

    def __init__(
        self,
        P: Partition,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        head_dim: int | None = None,
        dropout: float = 0.0,
        seed: int | None = None,
        axis: int = -1,
        split_sequence: bool = False,
        convention: Convention = "invariant",
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__()
        sequence_dim = -2 if split_sequence else None
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.qkv = ParallelQKV(
            P, embed_dim, num_heads, num_kv_heads, bias, device, dtype, head_dim=head_dim,
            axis=axis, sequence_dim=sequence_dim, convention=convention, shape=shape,
        )  # fmt: skip
        self.region, self.heads, self.head_dim = self.qkv.region, self.qkv.heads, self.qkv.head_dim
        self.out_proj = RowParallelLinear(
            P, num_heads * self.head_dim, embed_dim, bias, device, dtype, axis=axis,
            in_sizes=[count * self.head_dim for count in self.heads.queries],
            sequence_dim=sequence_dim, convention=convention,
        )  # fmt: skip
        self.dropout: DistributedDropout | None = None
        if dropout:
            grid = [*self.region.P.shape, 1, 1]
            P_weights = self.region.P.create_cartesian_topology_partition(grid)
            self.dropout = DistributedDropout(P_weights, dropout, seed=seed)

    def forward(
        self,
        x: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        lengths: Lengths | None = None,
    ) -> torch.Tensor:
        """Compute the attention of this worker's heads, and sum the projections over the workers.

        Args:
            x: input, or this worker's block of the sequence.
            attn_mask: mask as in torch, for the whole sequence, and for one head or all
                ``num_heads``.
            is_causal: whether to hide later keys from each query; excludes ``attn_mask``.
            lengths: lengths of all workers' blocks of the sequence, or their sum if they are
                balanced.

        Returns:
            The output, or this worker's block of its sequence.
        """
        if not self.region.P.active:
            return x.clone()
        self._require(x, attn_mask, is_causal)
        if self.qkv.sequence_dim is not None:
            lengths = self.region.lengths(x, x.dim() - 2, lengths)
        # To [B, heads, L, head_dim].
        batch = x if x.dim() == 3 else x.unsqueeze(0)
        q, k, v = (part.transpose(1, 2) for part in self.qkv(batch, lengths))
        y = self._attend(q, k, v, self._own_mask(attn_mask), is_causal)
        y = y.transpose(1, 2).flatten(2)
        return self.out_proj(y if x.dim() == 3 else y.squeeze(0), lengths)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """Return the attention of this worker's heads."""
        drops = self.dropout is not None and self.training
        if q.shape[1] == 0 and not drops:
            return q
        keys = self.heads.key_of_queries(self.region.rank)
        if keys != list(range(k.shape[1])):
            index = torch.tensor(keys, dtype=torch.int64, device=k.device)
            k, v = k.index_select(1, index), v.index_select(1, index)
        if not drops:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        assert self.dropout is not None
        if is_causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        # The weights of a query that sees no key are 0.
        weights = safe_softmax(attention_scores(q, k, mask), -1)
        return self.dropout(weights) @ v

    def _own_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        rank = self.region.rank
        return mask.narrow(-3, self.heads.first_query(rank), self.heads.queries[rank])

    def _require(self, x: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> None:
        text = None
        if x.dim() not in (2, 3) or x.shape[-1] != self.embed_dim:
            text = f"the input has shape {list(x.shape)}, not [L, {self.embed_dim}] nor [B, L, E]"
        elif mask is not None and is_causal:
            text = "attn_mask and is_causal are both given; pass only one"
        elif mask is not None and mask.dim() > 2 and mask.shape[-3] not in (1, self.num_heads):
            text = (
                f"the mask has shape {list(mask.shape)}; its dim -3 must be 1 or {self.num_heads}"
            )
        if text is not None:
            refuse(self.region.P, ShapeError(f"{type(self).__name__}: {text}"))

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
