"""Distributed multi-head attention: torch's layer for a sequence that is split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.blocks import Decomposition
from gpudist.nn.affine.linear import DistributedLinear
from gpudist.nn.attention.all_to_all import AllToAllAttention
from gpudist.nn.attention.layer import SequenceAttention
from gpudist.nn.attention.ring import RingAttention
from gpudist.nn.parameters.layer import ParameterLayer, move_those
from gpudist.nn.parameters.parameter import uniform_parameter
from gpudist.nn.parameters.placement import Placement
from gpudist.nn.partitions import arguments_of, plane, regrid
from gpudist.ops.agreement import ShapeMode
from gpudist.ops.bound import Bound
from gpudist.world.partition import CartesianPartition

Exchange = Literal["ring", "all_to_all"]


@dataclass
class _Arguments:
    """The arguments of torch's layer, in torch's order and with torch's defaults."""

    embed_dim: int
    num_heads: int
    dropout: float = 0.0
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    batch_first: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


class DistributedMultiheadAttention(ParameterLayer):
    """Torch's ``MultiheadAttention`` of tensors whose sequence and batch may be split.

    Features are whole on every worker, and so are the parameters that a worker uses. Initial values
    are those of the torch layer under the same seed.

    Args:
        P_x: owns query, key, value and output, ``[S, B, E]`` or, with ``batch_first``,
            ``[B, S, E]``; 1 worker along the last axis. Blocks may be uneven or empty.
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as torch's layer.
        add_bias_kv, add_zero_attn, kdim, vdim: not supported.
        exchange: how workers along the sequence get at each other's keys, by a ``"ring"``, as in
            :class:`~gpudist.nn.RingAttention`, or by an ``"all_to_all"``, as in
            :class:`~gpudist.nn.AllToAllAttention`, for at most as many workers as heads.
        seed: of the dropout, as of :class:`~gpudist.nn.DistributedDropout`.
        shape: ``"dynamic"`` agrees on the blocks at every call.
        replicate_parameters: every worker holds the parameters. None moves in forward; in backward
            the gradients are summed. Else the first worker owns them.

    Cost:
        That of the exchange. Without replicated parameters a broadcast of these.

    Raises:
        PartitionError: ``P_x`` has other axes.
        ShapeError: an argument is not supported.
    """

    _names = ("in_proj_weight", "in_proj_bias")

    def __init__(
        self,
        P_x: CartesianPartition,
        *arguments: Any,
        exchange: Exchange = "ring",
        seed: int | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._name = type(self).__name__
        given = arguments_of(self._name, _Arguments, arguments, options)
        self._require(P_x, given, exchange)
        self.embed_dim, self.num_heads = given.embed_dim, given.num_heads
        self.P_x, self.batch_first = P_x, given.batch_first
        out_proj = DistributedLinear(
            P_x, self.embed_dim, self.embed_dim, bias=given.bias, device=given.device,
            dtype=given.dtype, replicate_parameters=replicate_parameters,
        )  # fmt: skip
        if out_proj.bias is not None:
            torch.nn.init.zeros_(out_proj.bias.data)
        self._make_parameters(given, regrid(P_x, (P_x.size, 1, 1)), replicate_parameters)
        self.out_proj = out_proj
        kind = RingAttention if exchange == "ring" else AllToAllAttention
        P_heads = heads_partition(P_x, given.batch_first)
        self.attention: SequenceAttention = kind(
            P_heads, dropout_p=given.dropout, seed=seed, shape=shape
        )
        self._place(replicate_parameters, self._placements(), dict.fromkeys(self._names, P_x), P_x)
        self._bound = Bound[tuple[Movement | None, ...]]("static")

    def _require(self, P_x: CartesianPartition, given: _Arguments, exchange: str) -> None:
        if P_x.dim != 3 or P_x.shape[2] != 1:
            raise PartitionError(
                f"{self._name}: P_x has shape {list(P_x.shape)} but needs axes for batch, sequence "
                "and features, with 1 worker along the last"
            )
        if exchange not in ("ring", "all_to_all"):
            raise ShapeError(f"{self._name}: exchange is {exchange!r}; use 'ring' or 'all_to_all'")
        if given.embed_dim % given.num_heads:
            raise ShapeError(
                f"{self._name}: {given.num_heads} heads do not share out {given.embed_dim} features"
            )
        for name in ("add_bias_kv", "add_zero_attn", "kdim", "vdim"):
            if getattr(given, name) not in (None, False, given.embed_dim):
                raise ShapeError(f"{self._name}: {name} is not supported")

    def _make_parameters(
        self, given: _Arguments, P_line: CartesianPartition, replicate: bool
    ) -> None:
        """This worker's parameters, drawn as torch draws them, or placeholders; all draw."""
        features = given.embed_dim
        self._P_weight = P_line if replicate else plane(P_line, ())
        self._cut = Decomposition.balanced((3 * features, features), (1, 1))
        box = self._cut.block((0, 0)) if self._P_weight.active else None
        # Xavier's, of a matrix of these sizes.
        bound = math.sqrt(3.0) * math.sqrt(2.0 / float(4 * features))
        self.in_proj_weight = uniform_parameter(
            self._cut.shape, bound, box, given.device, given.dtype
        )
        self.in_proj_bias: torch.nn.Parameter | None = None
        if given.bias:
            cells = 3 * features if box is not None else 0
            zeros = torch.zeros(cells, device=given.device, dtype=given.dtype)
            self.in_proj_bias = torch.nn.Parameter(zeros)

    def _placements(self) -> dict[str, Placement]:
        P = self._P_weight
        placed = {"in_proj_weight": Placement(P, self._cut, (1, 2))}
        if self.in_proj_bias is not None:
            placed["in_proj_bias"] = Placement(P, Decomposition(self._cut.dims[:1]), (1,))
        return placed

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
        """The block of the output, and ``None`` in place of the weights.

        Args:
            query, key, value: this worker's blocks.
            key_padding_mask: ``[B, S]`` of bool, the block of the same keys; true where no query
                sees the key.
            need_weights, average_attn_weights: weights are not supported.
            attn_mask: only the causal one, which ``is_causal`` stands for.
            is_causal: a query sees the keys up to its own index.

        Raises:
            ShapeError: an argument is not supported.
        """
        if need_weights:
            raise ShapeError(f"{self._name}: the weights are split; pass need_weights=False")
        if attn_mask is not None and not is_causal:
            raise ShapeError(f"{self._name}: of masks, only is_causal=True is supported")
        if not self.P_x.active:
            return self.attention(query, key, value), None
        heads = self._heads(query, key, value)
        y = self.attention(*heads, key_padding_mask, is_causal=is_causal)
        y = y.transpose(1, 2)
        y = y.reshape(*y.shape[:2], self.embed_dim)
        return self.out_proj(y if self.batch_first else y.transpose(0, 1)), None

    def _heads(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values ``[B, H, S, D]``."""
        movements = self._bound(inputs[0], self._bind, self.uses_copies)
        weight, *biases = move_those(movements, self.own_parameters())
        query, key, value = inputs
        if query is key and key is value:
            bias = biases[0] if biases else None
            projected = F.linear(query, weight, bias).chunk(3, -1)
        else:
            shares = [x.chunk(3) for x in (weight, *biases)]
            parts = [tuple(share[i] for share in shares) for i in range(3)]
            projected = [F.linear(x, *part) for x, part in zip(inputs, parts, strict=True)]
        return [self._split_heads(x) for x in projected]

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        size = self.embed_dim // self.num_heads
        return x.reshape(*x.shape[:2], self.num_heads, size).transpose(1, 2)

    def _bind(self, x: torch.Tensor, uses_copies: int) -> tuple[Movement | None, ...]:
        return self.bind_parameters()

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"batch_first={self.batch_first}, P_x={list(self.P_x.shape)}"
        )


def heads_partition(P_x: CartesianPartition, batch_first: bool) -> CartesianPartition:
    """The workers of a tensor ``[B, S, E]``, or ``[S, B, E]``, for one ``[B, H, S, D]``."""
    first, second = P_x.shape[:2]
    if batch_first:
        return regrid(P_x, (first, 1, second, 1))
    order = [s * second + b for b in range(second) for s in range(first)]
    transposed = P_x.create_partition_inclusive(order)
    return transposed.create_cartesian_topology_partition((second, 1, first, 1))
