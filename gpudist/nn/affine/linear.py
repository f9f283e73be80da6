"""Distributed linear layer: the weight in blocks on a grid of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.blocks import Decomposition
from gpudist.nn.affine.weight_grid import WeightGrid
from gpudist.nn.autocast import sum_of_products
from gpudist.nn.parameters.layer import ParameterLayer, move_those
from gpudist.nn.parameters.parameter import (
    bias_bound,
    kaiming_bound,
    tied_empty,
    uniform_parameter,
    zero_bias,
)
from gpudist.nn.parameters.placement import Placement
from gpudist.nn.partitions import arguments_of, leading_partitions, plane, regrid, require_cells
from gpudist.ops.agreement import Agreement, Layout, ShapeMode
from gpudist.ops.bound import Bound
from gpudist.world.partition import CartesianPartition


@dataclass
class _Arguments:
    """The arguments of torch's layer, in torch's order and with torch's defaults."""

    in_features: int
    out_features: int
    bias: bool = True
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


class DistributedLinear(ParameterLayer):
    """``y = x W^T + b`` for a tensor ``[..., features]`` and a weight cut over a grid of workers.

    With ``P_x, P_y, P_w`` of shapes ``[*leading, fi]``, ``[*leading, fo]`` and
    ``[*leading, fo, fi]``, leading dims and features are split: ``x`` is broadcast to the grid of
    ``P_w``, each worker of which multiplies with one balanced block of the weight, and the products
    are summed into ``P_y``. The workers of ``P_w`` at index 0 of all leading axes own the blocks of
    the weight, and those of them at index 0 of the last axis the bias, so that nothing is counted
    twice. ``P_w`` of shape ``[fo, fi]`` will do where all leading axes are 1. With ``P_x`` alone,
    leading dims may be split and features are not; its rank 0 holds the parameters.

    Other workers hold zero-volume parameters. Initial values are those of the torch layer under the
    same seed.

    Args:
        P_x: owns the input; its axes count from the last dim of ``x``, which may have more leading
            dims. Blocks may be uneven or empty along leading dims.
        P_y, P_w: own the output, and use the weight; optional.
        in_features, out_features, bias, device, dtype: as torch's layer, global sizes.
        global_shape: of the input, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        replicate_parameters: every worker that uses a block of the parameters holds it. None moves
            in forward; in backward the gradients are summed over who holds the same cells, those of
            several layers together with :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        A broadcast of the input's blocks and a sum-reduce of the output's; where leading dims are
        split, with the first a broadcast of the parameters.

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
        replicate_parameters: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._name = name = type(self).__name__
        P_y, P_w, rest = leading_partitions(name, arguments, options)
        given = arguments_of(name, _Arguments, rest, options)
        self.in_features, self.out_features = given.in_features, given.out_features
        self.P_x, self.P_y = P_x, P_y if P_y is not None else P_x
        leading, fi = P_x.shape[:-1], P_x.shape[-1]
        self._grid: WeightGrid | None = None
        if P_w is not None and P_y is not None:
            fo = P_y.shape[-1]
            self._grid = WeightGrid.place(name, P_x, P_y, P_w, leading, (fo, fi), (1, fi), (fo, 1))
            require_cells(name, -1, fi, self.in_features, "input features")
            require_cells(name, -1, fo, self.out_features, "output features")
            self.P_w, self._P_all = P_w, self._grid.P_all
            P_weight, P_c = self._grid.P_weight, self._grid.P_c
            self._P_bias = plane(P_c, (P_c.dim - 2,))
            self._P_bias_used = plane(P_c, range(P_c.dim - 1))
            parts = self._grid.parts
            if replicate_parameters:
                P_weight, self._P_bias = P_c, self._P_bias_used
        elif fi > 1:
            raise PartitionError(
                f"{name}, dim -1: P_x of shape {list(P_x.shape)} splits the features; give P_y "
                f"and P_w of shapes {[*leading, 'fo']} and {[*leading, 'fo', fi]} too"
            )
        else:
            self.P_w, self._P_all = plane(P_x, ()), P_x
            P_weight = self._P_bias = self.P_w
            self._P_bias_used, parts = P_x, (1, 1)
            if replicate_parameters:
                P_weight = self._P_bias = regrid(P_x, (P_x.size, 1, 1))
        self._make_parameters(given, P_weight, parts)
        users = {"weight": P_x, "bias": P_x}
        if self._grid is not None:
            users = {"weight": self._grid.P_c, "bias": self._P_bias_used}
        self._place(replicate_parameters, self._placements(), users, self._P_all)
        self._agreement = Agreement(name, P_x, self._P_all, None, global_shape, shape)
        self._bound = Bound[tuple[Movement | None, ...]](
            shape if self._grid is not None else "static", self._agreement
        )

    def _make_parameters(
        self, given: _Arguments, P_weight: CartesianPartition, parts: tuple[int, int]
    ) -> None:
        """This worker's blocks, drawn as torch draws them, or placeholders; all workers draw."""
        outputs, inputs = self.out_features, self.in_features
        self._P_weight = P_weight
        self._weight_cut = Decomposition.balanced((outputs, inputs), parts)
        self._bias_cut = Decomposition(self._weight_cut.dims[:1])
        # The owner of a whole weight has an index of zeros, of any length.
        block = None if P_weight.index is None else ((0, *P_weight.index)[-2:])
        self.weight = uniform_parameter(
            (outputs, inputs),
            kaiming_bound(inputs),
            self._weight_cut.block(block) if block is not None else None,
            given.device,
            given.dtype,
        )
        self.bias: torch.nn.Parameter | None = None
        if given.bias:
            self.bias = uniform_parameter(
                (outputs,),
                bias_bound(inputs),
                self._bias_cut.block(block[:1]) if block and self._P_bias.active else None,
                given.device,
                given.dtype,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._P_all.active:
            return x.clone()
        if self._grid is None:
            return self._forward_whole(x)
        return self._forward_split(x, self._grid)

    def _forward_whole(self, x: torch.Tensor) -> torch.Tensor:
        """Features whole: the parameters come to the blocks of ``x``."""
        if x.shape[-1:] != (self.in_features,):
            raise ShapeError(
                f"{self._name}, dim -1: the input of shape {list(x.shape)} has "
                f"{x.shape[-1] if x.dim() else 0} features, not {self.in_features}"
            )
        movements = self._bound(self.weight, self._bind_whole, self.uses_copies)
        weight, *biases = move_those(movements, self.own_parameters())
        return F.linear(x, weight, biases[0] if biases else None)

    def _forward_split(self, x: torch.Tensor, grid: WeightGrid) -> torch.Tensor:
        """Features split: the blocks of ``x`` come to the parameters, or to copies of them."""
        spread, reduction, *shared = self._bound(x, self._agree_and_bind, self.uses_copies)
        assert reduction is not None
        block, weight, *biases = move_those((spread, *shared), [x, *self.own_parameters()])
        bias = biases[0] if biases else None
        if not grid.P_c.active:
            y = tied_empty(block.shape, block.dtype, block, weight, bias)
        else:
            if bias is not None and bias.numel() == 0:
                bias = zero_bias(bias, weight.shape[0])
            y = F.linear(block, weight, bias)
        return sum_of_products(reduction, y)

    def _placements(self) -> dict[str, Placement]:
        P_weight, P_bias = self._P_weight, self._P_bias
        # The one owner of a whole weight is alone on a grid of any number of axes.
        row, column = max(0, P_weight.dim - 2), P_weight.dim - 1
        placed = {"weight": Placement(P_weight, self._weight_cut, (row, column))}
        if self.bias is not None:
            placed["bias"] = Placement(P_bias, self._bias_cut, (row,))
        return placed

    def _bind_whole(self, weight: torch.Tensor, uses_copies: int) -> tuple[Movement | None, ...]:
        return self.bind_parameters()

    def _agree_and_bind(self, x: torch.Tensor, uses_copies: int) -> tuple[Movement | None, ...]:
        grid, layout = self._grid, self._agreement(x)
        assert grid is not None
        self._check(layout)
        *leading, _ = layout.decomposition.dims
        features = self._bias_cut.dims[0]
        spread = grid.bind_spread(layout, x)
        placeholder, dtype = spread.output_shape, spread.output_dtype
        reduction = grid.bind_sum(tuple(leading), features, layout.dtype, placeholder, dtype, x)
        return spread, reduction, *self.bind_parameters()

    def _check(self, layout: Layout) -> None:
        if layout.dims < self.P_x.dim:
            raise ShapeError(
                f"{self._name}: the input has {layout.dims} dims but P_x of shape "
                f"{list(self.P_x.shape)} has {self.P_x.dim} axes"
            )
        features = layout.decomposition.dims[-1]
        if features != self._weight_cut.dims[1]:
            sizes = [features.length(i) for i in range(features.parts)]
            raise ShapeError(
                f"{self._name}, dim -1: the input's blocks have {sizes} features but the "
                f"weight needs {self.in_features} in balanced blocks; repartition the input"
            )
