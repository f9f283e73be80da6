"""Distributed multi-head attention: torch's layer for a split sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.nn.affine.linear import DistributedLinear
from gpudist.nn.attention.all_to_all import AllToAllAttention
from gpudist.nn.attention.ring import RingAttention
from gpudist.nn.attention.sequence_attention import SequenceAttention
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.parameters.parameter import uniform_parameter
from gpudist.nn.parameters.parameter_layer import ParameterLayer, move_those
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.partitions import refuse_given, require_axes
from gpudist.ops.bind_cache import BindCache
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition

Exchange = Literal["ring", "all_to_all"]


@layer(
    F.multi_head_attention_forward,
    Sample((2, 7, 4)),
    Sample((2, 7, 4)),
    Sample((2, 7, 4)),
    embed_dim=4,
    num_heads=2,
    batch_first=True,
)
class DistributedMultiheadAttention(ParameterLayer):
    """Torch's ``MultiheadAttention`` for tensors whose sequence and batch may be split.

    Every worker holds all features and uses all parameters. Initial values equal those of the torch
    layer under the same seed.

    Args:
        P_x: partition of query, key, value and output, ``[S, B, E]`` or, with ``batch_first``,
            ``[B, S, E]``; 1 worker along the last axis. Blocks may be uneven or empty.
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as in the torch layer.
        add_bias_kv, add_zero_attn, kdim, vdim: not supported.
        exchange: exchange of keys and values along the sequence: ``"ring"``, see
            :class:`~gpudist.nn.RingAttention`, or ``"all_to_all"``, see
            :class:`~gpudist.nn.AllToAllAttention`, for at most as many workers as heads.
        seed: seed of the dropout; see :class:`~gpudist.nn.DistributedDropout`.
        shape: ``"dynamic"`` makes the ranks agree on the blocks at every call.
        replicate_parameters: keep a copy of the parameters on every worker. Forward then moves no
            parameters, and backward sums the gradients. Otherwise the first worker owns them.

    Cost:
        The cost of the exchange, plus a broadcast of the parameters unless they are replicated.

    Raises:
        PartitionError: ``P_x`` does not have 3 axes with 1 worker along the last.
        ShapeError: an argument is not supported.
    """

    _names = ("in_proj_weight", "in_proj_bias")

    def __init__(
        self,
        P_x: CartesianPartition,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        exchange: Exchange = "ring",
        seed: int | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:
        super().__init__()
        self._require(P_x, embed_dim, num_heads, exchange)
        refuse_given(
            self._name, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn,
            kdim=None if kdim == embed_dim else kdim, vdim=None if vdim == embed_dim else vdim,
        )  # fmt: skip
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.P_x, self.batch_first = P_x, batch_first
        out_proj = DistributedLinear(
            P_x, embed_dim, embed_dim, bias=bias, device=device, dtype=dtype,
            replicate_parameters=replicate_parameters,
        )  # fmt: skip
        if out_proj.bias is not None:
            torch.nn.init.zeros_(out_proj.bias.data)
        self._make_parameters(bias, device, dtype, replicate_parameters)
        self.out_proj = out_proj
        kind = RingAttention if exchange == "ring" else AllToAllAttention
        P_heads = heads_partition(P_x, batch_first)
        self.attention: SequenceAttention = kind(P_heads, dropout_p=dropout, seed=seed, shape=shape)
        self._bindings = BindCache[tuple[Movement | None, ...]]("static")

    def _require(
        self, P_x: CartesianPartition, embed_dim: int, num_heads: int, exchange: str
    ) -> None:
        require_axes(
            self._name,
            P_x,
            P_x.dim == 3 and P_x.shape[2] == 1,
            "axes for batch, sequence and features, with 1 worker along the last",
        )
        if exchange not in ("ring", "all_to_all"):
            raise ShapeError(f"{self._name}: exchange is {exchange!r}; use 'ring' or 'all_to_all'")
        if embed_dim % num_heads:
            raise ShapeError(
                f"{self._name}: embed_dim {embed_dim} must be divisible by num_heads {num_heads}"
            )

    def _make_parameters(
        self,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        replicate_parameters: bool,
    ) -> None:
        """Draw the parameters with torch's initialization, or create placeholders.

        Every worker must call this method, to keep all random generators in the same state.
        """
        features = self.embed_dim
        shapes = {"in_proj_weight": (3 * features, features), "in_proj_bias": (3 * features,)}
        names = self._names if bias else self._names[:1]
        used = {name: ParameterPlacement.on(self.P_x, shapes[name]) for name in names}
        self._place(replicate_parameters, used, self.P_x)
        weight = self._placed["in_proj_weight"]
        # Xavier initialization of the whole matrix, [3 E, E].
        bound = math.sqrt(3.0) * math.sqrt(2.0 / float(4 * features))
        self.in_proj_weight = uniform_parameter(weight.shape, bound, weight.own_box, device, dtype)
        self.in_proj_bias: torch.nn.Parameter | None = None
        if bias:
            cells = self._placed["in_proj_bias"].own_shape
            zeros = torch.zeros(cells, device=device, dtype=dtype)
            self.in_proj_bias = torch.nn.Parameter(zeros)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Return the block of the output, and ``None`` in place of the weights.

        Args:
            query, key, value: this worker's blocks.
            key_padding_mask: bool tensor ``[B, S]``, the block of the same keys; ``True`` hides a
                key from all queries.
            need_weights, average_attn_weights: returning weights is not supported.
            attn_mask: ignored with ``is_causal``; no other mask is supported.
            is_causal: whether a query attends only to keys up to its own index.

        Returns:
            This worker's block of the output, and ``None``.

        Raises:
            ShapeError: an argument is not supported.
        """
        if need_weights:
            raise ShapeError(
                f"{self._name}: need_weights is true, but the attention weights are split over "
                "workers; pass need_weights=False"
            )
        if attn_mask is not None and not is_causal:
            raise ShapeError(f"{self._name}: attn_mask is supported only with is_causal=True")
        if not self.P_x.active:
            return self.attention(query, key, value), None
        heads = self._project_to_heads(query, key, value)
        y = self.attention(*heads, key_padding_mask, is_causal=is_causal)
        y = y.transpose(1, 2)
        y = y.reshape(*y.shape[:2], self.embed_dim)
        return self.out_proj(y if self.batch_first else y.transpose(0, 1)), None

    def _project_to_heads(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        movements = self._bindings(inputs[0], self._bind_own, self.way_of(inputs[0]))
        weight, *biases = move_those(movements, self.own_parameters())
        projected = project(inputs, weight, None, biases[0] if biases else None)
        return [self._split_heads(x) for x in projected]

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        size = self.embed_dim // self.num_heads
        return x.reshape(*x.shape[:2], self.num_heads, size).transpose(1, 2)

    def _bind_own(self, x: torch.Tensor, way: int) -> tuple[Movement | None, ...]:
        return self.bind_parameters()

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"batch_first={self.batch_first}, P_x={list(self.P_x.shape)}"
        )


def project(
    inputs: Sequence[torch.Tensor],
    packed: torch.Tensor | None,
    weights: Any,
    bias: torch.Tensor | None,
) -> Sequence[torch.Tensor]:
    """Project queries, keys and values by ``packed``, or else by three ``weights``."""
    query, key, value = inputs
    if weights is None:
        assert packed is not None
        if query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, -1)
        weights = packed.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def heads_partition(P_x: CartesianPartition, batch_first: bool) -> CartesianPartition:
    """Return the partition of ``[B, H, S, D]`` for one of ``[B, S, E]`` or ``[S, B, E]``."""
    first, second = P_x.shape[:2]
    if batch_first:
        return P_x.create_cartesian_topology_partition((first, 1, second, 1))
    order = [s * second + b for b in range(second) for s in range(first)]
    transposed = P_x.create_partition_inclusive(order)
    return transposed.create_cartesian_topology_partition((second, 1, first, 1))
