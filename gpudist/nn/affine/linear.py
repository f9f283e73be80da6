"""Distributed linear layer: the weight in blocks on a grid of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn.affine.affine_layer import AffineLayer, BoundAffine
from gpudist.nn.affine.affine_placement import AffinePlacement, place_matrix
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import partitions_lead, plane, require_cells
from gpudist.ops.bind_cache import BindCache
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


@layer(F.linear, Sample((6, 7, 4)), in_features=4, out_features=5)
class DistributedLinear(AffineLayer):
    """``y = x W^T + b`` for a tensor ``[..., features]`` and a weight partitioned over a grid.

    With ``P_x, P_y, P_w`` of shapes ``[*leading, fi]``, ``[*leading, fo]`` and
    ``[*leading, fo, fi]``, leading dims and features are split: ``x`` is broadcast to the grid of
    ``P_w``, each of its workers multiplies by one balanced block of the weight, and the products
    are sum-reduced into ``P_y``. The workers of ``P_w`` at index 0 of all leading axes own the
    blocks of the weight. Those also at index 0 of the last axis own the bias, so that it is added
    once. If all leading axes are 1, ``P_w`` may have shape ``[fo, fi]``. With ``P_x`` alone, only
    leading dims may be split; its rank 0 holds the parameters.

    All other workers hold zero-volume parameters. Initial values equal those of the torch layer
    under the same seed.

    Args:
        P_x: partition of the input; its axes are aligned with the last dims of ``x``, which may
            have more leading dims. Blocks may be uneven or empty along leading dims.
        P_y, P_w: partitions of the output and of the weight; optional. Pass both, by name or
            directly after ``P_x``.
        in_features, out_features, bias, device, dtype: as in the torch layer; sizes are global.
        global_shape: global shape of the input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        replicate_parameters: keep a copy of each parameter block on every worker that uses it.
            Forward then moves no parameters, and backward sums the gradients over the copies;
            :func:`~gpudist.nn.fuse_parameter_movements` sums those of several layers together.

    Cost:
        A broadcast of the input blocks and a sum-reduce of the output blocks. If leading dims are
        split, the parameters are broadcast together with the input.

    Raises:
        PartitionError: the partitions do not match.
        ShapeError: there are more blocks than features, or the input's blocks do not fit the
            weight's.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 4.
    """

    @overload
    def __init__(
        self, P_x: CartesianPartition, in_features: int, out_features: int, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        P_y: CartesianPartition | None = None, P_w: CartesianPartition | None = None,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, P_x: CartesianPartition, P_y: CartesianPartition, P_w: CartesianPartition,
        in_features: int, out_features: int, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @partitions_lead
    def __init__(
        self, P_x: CartesianPartition, in_features: int, out_features: int, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        P_y: CartesianPartition | None = None, P_w: CartesianPartition | None = None,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.P_x, self.P_y = P_x, P_y if P_y is not None else P_x
        leading, fi = P_x.shape[:-1], P_x.shape[-1]
        self._placement = AffinePlacement.whole(P_x)
        self.P_w = plane(P_x, ())
        if P_w is not None and P_y is not None:
            fo = P_y.shape[-1]
            self.P_w = P_w
            self._placement = place_matrix(
                self._name, P_x, P_y, P_w, leading, (fo, fi), (1, fi), (fo, 1)
            )
            require_cells(self._name, -1, fi, self.in_features, "input features")
            require_cells(self._name, -1, fo, self.out_features, "output features")
        elif fi > 1:
            raise PartitionError(
                f"{self._name}, dim -1: P_x of shape {list(P_x.shape)} splits the features; give "
                f"P_y and P_w of shapes {[*leading, 'fo']} and {[*leading, 'fo', fi]} too"
            )
        weight_shape, cells = (out_features, in_features), out_features if bias else None
        used = self._placement.parameters(weight_shape, cells)
        self._place(replicate_parameters, used, self._placement.P_all)
        self._draw_affine(device, dtype)
        self._agree_on(P_x, None, global_shape, shape, self._placement.P_all)
        self._whole = BindCache[BoundAffine]("static")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._placement.P_all.active:
            return x.clone()
        if self._placement.P_source is None:
            self._require_whole_features(x)
            bound = self._whole(self.weight, self._bind_whole, self.way_of(x))
        else:
            bound = self._bindings(x, self._agree_and_bind, self.way_of(x))
        weight, bias = [*self.own_parameters(), None][:2]
        return self.affine(bound, x, weight, bias)

    def _compute(
        self,
        bound: BoundAffine,
        x: torch.Tensor,
        block: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return F.linear(block, weight, bias)

    def _require_whole_features(self, x: torch.Tensor) -> None:
        if x.shape[-1:] != (self.in_features,):
            raise ShapeError(
                f"{self._name}, dim -1: the input of shape {list(x.shape)} has "
                f"{(x.shape[-1] if x.dim() else 0)} features, not {self.in_features}"
            )
        if x.dtype != self.weight.dtype:
            self._require_dtype(x.dtype)

    def _bind_whole(self, weight: torch.Tensor, way: int) -> BoundAffine:
        return BoundAffine(None, self.bind_parameters(), None, self.out_features)

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> BoundAffine:
        self._require_dtype(layout.dtype)
        self._check(layout)
        return self._bind_matrix(layout, x, layout.decomposition.dims[:-1], 0)

    def _check(self, layout: BlockLayout) -> None:
        if layout.dims < self.P_x.dim:
            raise ShapeError(
                f"{self._name}: the input has {layout.dims} dims but P_x of shape "
                f"{list(self.P_x.shape)} has {self.P_x.dim} axes; a block needs one dim per axis"
            )
        features = layout.decomposition.dims[-1]
        if features != self._placed["weight"].blocks[1]:
            raise ShapeError(
                f"{self._name}, dim -1: the input's blocks have {list(features.lengths)} features "
                f"but the weight needs {self.in_features} in balanced blocks; repartition the input"
            )
