"""Queries, keys and values of attention with split heads, computed by one matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import ShapeError
from gpudist.nn.distributed_module import CheckedModule
from gpudist.nn.tensor_parallel.head_cut import HeadCut
from gpudist.nn.tensor_parallel.linear import ParallelLinear
from gpudist.nn.tensor_parallel.region import Convention, Lengths, TensorRegion
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import Partition


class HeadProjection(ParallelLinear):
    """Linear layer of which each worker holds the rows of its heads."""

    def __init__(
        self,
        region: TensorRegion,
        embed_dim: int,
        heads: Sequence[int],
        head_dim: int,
        sequence_dim: int | None,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(region, embed_dim, sum(heads) * head_dim, sequence_dim)
        self._name = ParallelQKV.__name__
        rows = [count * head_dim for count in heads]
        self._make_parameters(rows, 0, bias, device, dtype, len(rows))


class ParallelQKV(CheckedModule):
    """Linear projections to queries, keys and values, split by whole heads over workers.

    The parameters are those of three :class:`torch.nn.Linear`, ``q_proj``, ``k_proj`` and
    ``v_proj``, initialized in this order; one product computes all three. Every worker holds the
    key heads that its query heads use. If there are fewer key heads than workers, or their number
    is not divisible, several workers hold the same key heads and sum their gradients. A worker may
    have no query heads.

    Args:
        P: partition of the workers.
        embed_dim: number of input features.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, each shared by the same number of query heads;
            by default ``num_heads``.
        bias, device, dtype: see :class:`torch.nn.Linear`.
        head_dim: number of features per head, by default ``embed_dim / num_heads``.
        axis, sequence_dim, convention, shape: see :class:`~gpudist.nn.ColumnParallelLinear`.

    Attributes:
        heads: assignment of heads to workers.

    Cost:
        See :class:`~gpudist.nn.ColumnParallelLinear`, once for all three projections. A copy of the
        weights at each call; in backward an all-reduce of the gradients of key and value heads
        among the workers that hold the same heads.

    Raises:
        ShapeError: the heads do not fit.

    Source:
        Ainslie et al. 2023, arXiv:2305.13245.
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
        axis: int = -1,
        sequence_dim: int | None = None,
        convention: Convention = "invariant",
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__()
        self.region = region = TensorRegion(self._name, P, axis, convention, shape)
        if head_dim is None and embed_dim % num_heads:
            raise ShapeError(
                f"{self._name}: embed_dim {embed_dim} is not a multiple of num_heads {num_heads}; "
                "pass head_dim"
            )
        self.head_dim = head_dim if head_dim is not None else embed_dim // num_heads
        self.heads = HeadCut.of(self._name, num_heads, num_kv_heads or num_heads, region.size)
        self.sequence_dim = sequence_dim
        options = self.head_dim, sequence_dim, bias, device, dtype
        self.q_proj = HeadProjection(region, embed_dim, self.heads.queries, *options)
        self.k_proj = HeadProjection(region, embed_dim, self.heads.keys, *options)
        self.v_proj = HeadProjection(region, embed_dim, self.heads.keys, *options)

    def forward(
        self, x: torch.Tensor, lengths: Lengths | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries of this worker's heads, and the keys and values that they use.

        Args:
            x: input, or this worker's block of the sequence.
            lengths: see :class:`~gpudist.nn.ColumnParallelLinear`.

        Returns:
            Three tensors ``[..., heads, head_dim]`` for the whole sequence; clones of the input on
            workers outside ``P``.
        """
        if not self.region.P.active:
            return x.clone(), x.clone(), x.clone()
        queries = self.heads.queries[self.region.rank]
        first, last = self.heads.used_keys(self.region.rank)
        counts = [queries, last - first, last - first]
        starts = [0, first, first]
        weights: list[torch.Tensor] = []
        biases: list[torch.Tensor] = []
        layers = self.q_proj, self.k_proj, self.v_proj
        for layer, start, count in zip(layers, starts, counts, strict=True):
            weight, *bias = layer.own_parameters()
            cells = start * self.head_dim, count * self.head_dim
            weights.append(weight.narrow(0, *cells))
            biases += [b.narrow(0, *cells) for b in bias]
        bias = torch.cat(biases) if biases else None
        y = self.q_proj.multiply_whole(x, lengths, torch.cat(weights), bias)
        q, k, v = y.unflatten(-1, (sum(counts), self.head_dim)).split(counts, -2)
        return q, k, v

    def extra_repr(self) -> str:
        return f"query heads {list(self.heads.queries)}, key heads {list(self.heads.keys)}"
