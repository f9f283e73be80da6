"""Distributed layer and RMS normalization over dims that may be split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.norm.base import Norm
from gpudist.nn.norm.normalization import Normalization
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedTrailingNorm(Norm):
    """Normalization over the last dims, separately at each position of the other dims."""

    _subtracts_mean: bool

    def __init__(
        self,
        P_x: CartesianPartition,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        elementwise_affine: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        global_shape: Sequence[int] | None,
        shape: ShapeMode,
        replicate_parameters: bool,
    ) -> None:
        if isinstance(normalized_shape, int):
            normalized_shape = (normalized_shape,)
        self.normalized_shape = tuple(normalized_shape)
        count = len(self.normalized_shape)
        if count == 0 or count > P_x.dim:
            raise PartitionError(
                f"{self._name}: normalized_shape {list(self.normalized_shape)} has {count} dims; "
                f"it needs at least 1 and at most {P_x.dim}, one per axis of P_x of shape "
                f"{list(P_x.shape)}"
            )
        self._dims = tuple(range(P_x.dim - count, P_x.dim))
        super().__init__(
            P_x, self.normalized_shape, self._dims, elementwise_affine,
            elementwise_affine and bias, device, dtype, global_shape, shape,
            replicate_parameters,
        )  # fmt: skip
        self.eps = eps
        self.elementwise_affine = elementwise_affine

    def _check(self, layout: BlockLayout) -> None:
        shape = layout.decomposition.shape
        if shape[self._dims[0] :] != self.normalized_shape:
            raise ShapeError(
                f"{type(self).__name__}, dim {self._dims[0]}: the input of global shape "
                f"{list(shape)} does not end in normalized_shape {list(self.normalized_shape)}"
            )

    def _normalization(self, layout: BlockLayout) -> Normalization:
        wide = torch.promote_types(layout.dtype, torch.float32)
        eps = self.eps if self.eps is not None else torch.finfo(wide).eps
        return Normalization(self._dims, eps, self._subtracts_mean, per_channel=False)


@layer(F.layer_norm, Sample((6, 7, 8)), normalized_shape=8)
class DistributedLayerNorm(_DistributedTrailingNorm):
    """Layer normalization of a tensor split over ``P_x`` along any dims, including normalized ones.

    Args:
        P_x: partition of the input and the output, one axis per dim.
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in torch's layer; the
            shape is global.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        replicate_parameters: keep a copy of each parameter block on every worker that uses it. No
            parameter moves in forward; in backward, gradients are summed over the workers that hold
            the same cells, and those of several layers together with
            :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        One group of messages: where normalized dims are split, an all-reduce over their axes of two
        float64 per normalized vector; where leading dims are split, a broadcast of the parameters'
        blocks along their axes. Uneven blocks of normalized dims require one more message to
        repartition the parameters. Backward costs the same.

    Raises:
        PartitionError: at construction, if ``P_x`` has fewer axes than there are normalized dims.
        ShapeError: on every rank alike, if the input does not end in the normalized shape.

    Source:
        Ba, Kiros & Hinton 2016, arXiv:1607.06450.
    """

    _subtracts_mean = True

    def __init__(
        self,
        P_x: CartesianPartition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:
        super().__init__(
            P_x, normalized_shape, eps, elementwise_affine, bias, device, dtype,
            global_shape, shape, replicate_parameters,
        )  # fmt: skip


@layer(F.rms_norm, Sample((6, 7, 8)), normalized_shape=8)
class DistributedRMSNorm(_DistributedTrailingNorm):
    """RMS normalization of a tensor split over ``P_x`` along any dims, including normalized ones.

    Args:
        P_x: partition of the input and the output, one axis per dim.
        normalized_shape, eps, elementwise_affine, device, dtype: as in torch's layer; the shape is
            global.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        replicate_parameters: keep a copy of each parameter block on every worker that uses it. No
            parameter moves in forward; in backward, gradients are summed over the workers that hold
            the same cells, and those of several layers together with
            :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        One group of messages: where normalized dims are split, an all-reduce over their axes of one
        float64 per normalized vector; where leading dims are split, a broadcast of the weight's
        blocks along their axes. Uneven blocks of normalized dims require one more message to
        repartition the weight. Backward costs the same.

    Raises:
        PartitionError: at construction, if ``P_x`` has fewer axes than there are normalized dims.
        ShapeError: on every rank alike, if the input does not end in the normalized shape.

    Source:
        Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    _subtracts_mean = False

    def __init__(
        self,
        P_x: CartesianPartition,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:
        super().__init__(
            P_x, normalized_shape, eps, elementwise_affine, False, device, dtype,
            global_shape, shape, replicate_parameters,
        )  # fmt: skip
