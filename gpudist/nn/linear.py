"""Distributed linear layer: the weight in blocks on a grid of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.autograd import move
from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.broadcasting import Pairing
from gpudist.nn.parameter import (
    bias_bound,
    bind_parameter,
    kaiming_bound,
    tied_empty,
    uniform_parameter,
    zero_bias,
)
from gpudist.nn.partitions import leading_partitions, plane, regrid, require_cells, require_shape
from gpudist.ops.agreement import Agreement, Layout, ShapeMode
from gpudist.ops.broadcast import plan_between
from gpudist.ops.operator import Bound, placeholder_shape
from gpudist.partition import CartesianPartition


@dataclass
class _Arguments:
    """The arguments of torch's layer, in torch's order and with torch's defaults."""

    in_features: int
    out_features: int
    bias: bool = True
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


class DistributedLinear(torch.nn.Module):
    """``y = x W^T + b`` for a tensor ``[..., features]`` and a weight cut over a grid of workers.

    With ``P_x, P_y, P_w`` of shapes ``[..., fi]``, ``[..., fo]`` and ``[fo, fi]``, leading axes 1,
    features
    are split: ``x`` is broadcast to the grid of ``P_w``, each worker of which holds one balanced
    block of the weight, and the products are summed into ``P_y``. The bias lives on the workers of
    ``P_w`` at index 0 of axis 1, so that nothing is counted twice. With ``P_x`` alone, leading dims
    may be split and features are not; its rank 0 holds the parameters.

    Other workers hold zero-volume parameters. Initial values are those of the torch layer under the
    same seed.

    Args:
        P_x: owns the input; its axes count from the last dim of ``x``, which may have more leading
            dims.
        P_y, P_w: own the output, and the weight; optional.
        in_features, out_features, bias, device, dtype: as torch's layer, global sizes.
        global_shape: of the input, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.

    Cost:
        A broadcast of the input's blocks and a sum-reduce of the output's; with ``P_x`` alone, a
        broadcast of the parameters.

    Raises:
        PartitionError: the partitions do not fit each other.
        ShapeError: there are more blocks than features, or the input's blocks do not fit the
            weight's.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 4.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        *arguments: Any,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        **options: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        P_y, P_w, rest = leading_partitions(name, arguments, options)
        given = _Arguments(*rest, **options)
        self.in_features, self.out_features = given.in_features, given.out_features
        self.P_x, self.P_y = P_x, P_y if P_y is not None else P_x
        leading = (1,) * (P_x.dim - 1)
        fi = P_x.shape[-1]
        self._split = P_w is not None and P_y is not None
        if P_w is not None and P_y is not None:
            fo = P_y.shape[-1]
            require_shape(name, "P_x", P_x, (*leading, None))
            require_shape(name, "P_y", P_y, (*(1,) * (P_y.dim - 1), None))
            require_shape(name, "P_w", P_w, (fo, fi))
            require_cells(name, -1, fi, self.in_features, "input features")
            require_cells(name, -1, fo, self.out_features, "output features")
            self.P_w = P_w
            self._P_x_paired = regrid(P_x, (1, fi))
            self._P_y_paired = regrid(P_y, (fo, 1))
            self._P_all = P_x.create_partition_union(P_w).create_partition_union(P_y)
        elif fi > 1:
            raise PartitionError(
                f"{name}, dim -1: P_x of shape {list(P_x.shape)} splits the features; give P_y "
                f"and P_w of shapes {[*leading, 'fo']} and {['fo', fi]} too"
            )
        else:
            self.P_w = plane(P_x, ())
            self._P_all = P_x
        self._make_parameters(given)
        self._agreement = Agreement(name, P_x, self._P_all, None, global_shape, shape)
        self._bound = Bound[tuple[Movement, ...]](
            shape if self._split else "static", self._agreement
        )

    def _make_parameters(self, given: _Arguments) -> None:
        self._weight_cut = Decomposition.balanced(
            (self.out_features, self.in_features), self.P_w.shape if self._split else (1, 1)
        )
        self._bias_cut = Decomposition(self._weight_cut.dims[:1])
        index = self.P_w.index
        weight_index = index if self._split else (index and (0, 0))
        has_bias = weight_index is not None and weight_index[1] == 0
        self.weight = uniform_parameter(
            (self.out_features, self.in_features),
            kaiming_bound(self.in_features),
            self._weight_cut.block(weight_index) if weight_index is not None else None,
            given.device,
            given.dtype,
        )
        self.bias: torch.nn.Parameter | None = None
        if given.bias:
            self.bias = uniform_parameter(
                (self.out_features,),
                bias_bound(self.in_features),
                self._bias_cut.block(weight_index[:1]) if has_bias and weight_index else None,
                given.device,
                given.dtype,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._P_all.active:
            return x.clone()
        return self._forward_split(x) if self._split else self._forward_whole(x)

    def _forward_whole(self, x: torch.Tensor) -> torch.Tensor:
        """Features whole: the parameters come to the blocks of ``x``."""
        if x.shape[-1:] != (self.in_features,):
            raise ShapeError(
                f"DistributedLinear, dim -1: the input of shape {list(x.shape)} has "
                f"{x.shape[-1] if x.dim() else 0} features, not {self.in_features}"
            )
        inputs = [self.weight] if self.bias is None else [self.weight, self.bias]
        weight, *biases = move(self._bound(self.weight, self._bind_parameters), inputs)
        return F.linear(x, weight, biases[0] if biases else None)

    def _bind_parameters(self, weight: torch.Tensor) -> tuple[Movement, ...]:
        P_w, P_x = self.P_w, self.P_x
        movements = [bind_parameter(weight, P_w, P_x, self._weight_cut, "weight")]
        if self.bias is not None:
            movements.append(bind_parameter(self.bias, P_w, P_x, self._bias_cut, "bias"))
        return tuple(movements)

    def _forward_split(self, x: torch.Tensor) -> torch.Tensor:
        """Features split: the blocks of ``x`` come to the parameters."""
        spread, reduction = self._bound(x, self._agree_and_bind)
        block = move((spread,), (x,))[0]
        bias = self.bias
        if not self.P_w.active:
            y = tied_empty(block.shape, block.dtype, block, self.weight, bias)
        else:
            if bias is not None and bias.numel() == 0:
                bias = zero_bias(bias, self.weight.shape[0])
            y = F.linear(block, self.weight, bias)
        return move((reduction,), (y,))[0]

    def _agree_and_bind(self, x: torch.Tensor) -> tuple[Movement, ...]:
        layout = self._agreement(x)
        self._check(layout)
        spread = self._bind_spread(layout, x)
        return spread, self._bind_reduction(layout, spread, x)

    def _check(self, layout: Layout) -> None:
        features = layout.decomposition.dims[-1]
        if features != self._weight_cut.dims[1]:
            sizes = [features.length(i) for i in range(features.parts)]
            raise ShapeError(
                f"DistributedLinear, dim -1: the input's blocks have {sizes} features but the "
                f"weight needs {self.in_features} in balanced blocks; repartition the input"
            )

    def _bind_spread(self, layout: Layout, x: torch.Tensor) -> Movement:
        P_x, P_w = self._P_x_paired, self.P_w
        P_both = P_x.create_partition_union(P_w)
        plan = plan_between(
            P_x, P_w, P_both, Pairing(P_x.shape, P_w.shape), layout.shape_of, layout.key
        )
        label = f"broadcast {list(P_x.shape)} -> {list(P_w.shape)}"
        empty = placeholder_shape(x)
        return bind(plan, P_both, label, layout.dtype, x.shape, x.dtype, empty)

    def _bind_reduction(self, layout: Layout, spread: Movement, x: torch.Tensor) -> Movement:
        P_y, P_w = self._P_y_paired, self.P_w
        P_both = P_y.create_partition_union(P_w)
        leading = layout.shape_of(0)[:-1]
        plan = plan_between(
            P_y, P_w, P_both, Pairing(P_y.shape, P_w.shape),
            lambda rank: (*leading, self._bias_cut.dims[0].length(rank)),
            (leading, self._bias_cut),
        ).T  # fmt: skip
        label = f"sum_reduce {list(P_w.shape)} -> {list(P_y.shape)}"
        empty = placeholder_shape(x)
        shape, dtype = spread.output_shape, spread.output_dtype
        return bind(plan, P_both, label, layout.dtype, shape, dtype, empty)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"P_x={list(self.P_x.shape)}, P_y={list(self.P_y.shape)}, P_w={list(self.P_w.shape)}"
        )
