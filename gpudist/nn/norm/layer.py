"""Distributed layer and RMS normalization, over dims that may be split."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.nn.norm.base import Norm
from gpudist.nn.norm.normalization import Normalization, bind_total
from gpudist.ops.agreement import Layout, ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedTrailingNorm(Norm):
    """Normalization over the last dims, each position of the others for itself."""

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
        name = type(self).__name__
        if isinstance(normalized_shape, int):
            normalized_shape = (normalized_shape,)
        self.normalized_shape = tuple(normalized_shape)
        count = len(self.normalized_shape)
        if count == 0 or count > P_x.dim:
            raise PartitionError(
                f"{name}: normalized_shape {list(self.normalized_shape)} has {count} dims; "
                f"it needs at least one, and P_x of shape {list(P_x.shape)} an axis for each"
            )
        self._dims = tuple(range(P_x.dim - count, P_x.dim))
        super().__init__(
            P_x, self.normalized_shape, self._dims, elementwise_affine,
            elementwise_affine and bias, device, dtype, global_shape, shape,
            replicate_parameters,
        )  # fmt: skip
        self.eps = eps
        self.elementwise_affine = elementwise_affine

    def _check(self, layout: Layout) -> None:
        shape = layout.decomposition.shape
        if shape[self._dims[0] :] != self.normalized_shape:
            raise ShapeError(
                f"{type(self).__name__}, dim {self._dims[0]}: the input of global shape "
                f"{list(shape)} does not end in normalized_shape {list(self.normalized_shape)}"
            )

    def _bind_layout(
        self, layout: Layout, parameters: tuple[Movement | None, ...]
    ) -> Normalization:
        assert self.P_x.rank is not None
        leading = layout.shape_of(self.P_x.rank)[: self._dims[0]]
        wide = torch.promote_types(layout.dtype, torch.float32)
        eps = self.eps if self.eps is not None else torch.finfo(wide).eps
        sums = (*leading, *(1,) * len(self._dims), 2 if self._subtracts_mean else 1)
        return Normalization(
            self._dims,
            prod(self.normalized_shape),
            eps,
            self._subtracts_mean,
            per_channel=False,
            total=bind_total(self.P_x, self._dims, layout, sums),
            parameters=parameters,
        )


class DistributedLayerNorm(_DistributedTrailingNorm):
    """Layer normalization of a tensor cut over ``P_x`` in any dims, the normalized ones included.

    Args:
        P_x: owns the input and the output, one axis per dim.
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as torch's layer; the shape
            is global.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        replicate_parameters: every worker that uses a block of the parameters holds it. None moves
            in forward; in backward the gradients are summed over who holds the same cells, those of
            several layers together with :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        One group of messages: where normalized dims are split, an all-reduce over their axes of two
        float64 for each normalized vector; where leading dims are split, a broadcast of the
        parameters' blocks along their axes. Uneven blocks of normalized dims: one message more to
        cut the parameters alike. Backward the same.

    Raises:
        PartitionError: at construction, if there are fewer axes than normalized dims.
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

    def _normalize_alone(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        bound: Normalization,
    ) -> torch.Tensor:
        assert self.eps is not None
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class DistributedRMSNorm(_DistributedTrailingNorm):
    """RMS normalization of a tensor cut over ``P_x`` in any dims, the normalized ones included.

    Args:
        P_x: owns the input and the output, one axis per dim.
        normalized_shape, eps, elementwise_affine, device, dtype: as torch's layer; the shape is
            global.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        replicate_parameters: every worker that uses a block of the parameters holds it. None moves
            in forward; in backward the gradients are summed over who holds the same cells, those of
            several layers together with :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        One group of messages: where normalized dims are split, an all-reduce over their axes of one
        float64 for each normalized vector; where leading dims are split, a broadcast of the
        weight's blocks along their axes. Uneven blocks of normalized dims: one message more to cut
        the weight alike. Backward the same.

    Raises:
        PartitionError: at construction, if there are fewer axes than normalized dims.
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

    def _normalize_alone(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        bound: Normalization,
    ) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)
