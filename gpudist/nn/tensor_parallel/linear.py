"""Tensor-parallel linear layers: the weight split by columns or rows over a line of workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks
from gpudist.nn.parameters.replication import holders_of
from gpudist.nn.tensor_parallel.parallel_layer import ParallelLayer
from gpudist.nn.tensor_parallel.region import Convention, Lengths, TensorRegion
from gpudist.ops.shape_agreement import ShapeMode, refuse
from gpudist.world.partition import Partition


class ParallelLinear(ParallelLayer):
    """Linear layer whose parameters are split into blocks of rows or columns."""

    def __init__(
        self,
        region: TensorRegion,
        in_features: int,
        out_features: int,
        sequence_dim: int | None,
    ) -> None:
        super().__init__(region, sequence_dim)
        self.in_features, self.out_features = in_features, out_features

    def _make_parameters(
        self,
        sizes: Sequence[int],
        dim: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        parts: int | None = None,
    ) -> None:
        """Create the blocks of the weight along ``dim``; the bias is split only with the rows."""
        shape, region = (self.out_features, self.in_features), self.region
        features, workers = shape[dim], parts or region.size
        if len(sizes) != workers or sum(sizes) != features or min(sizes) < 0:
            raise ShapeError(
                f"{self._name}: the block sizes are {list(sizes)}, but {features} features on "
                f"{workers} workers need {workers} sizes of at least 0 that add up to {features}"
            )
        placed = {"weight": region.placement(sizes, shape, dim, parts)}
        if bias:
            placed["bias"] = region.placement(None if dim else sizes, shape[:1], 0, parts)
        self._place(True, placed, region.P)
        self._draw_affine(device, dtype)

    def _require_features(self, x: torch.Tensor, features: int) -> None:
        if x.dim() == 0 or x.shape[-1] != features:
            refuse(
                self.region.line,
                ShapeError(
                    f"{self._name}, dim -1: the input of shape {list(x.shape)} has "
                    f"{x.shape[-1] if x.dim() else 0} features, not {features}"
                ),
            )

    def multiply_whole(
        self,
        x: torch.Tensor,
        lengths: Lengths | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the product of the full input and this worker's rows."""
        self._require_features(x, self.in_features)
        if self.sequence_dim is None:
            return F.linear(self.region.copy(x), weight, bias)
        dim = self._sequence_of(x)
        known = self.region.lengths(x, dim, lengths)
        return F.linear(self.region.gather(x, dim, known), weight, bias)

    def multiply_own(
        self, x: torch.Tensor, lengths: Lengths | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum over workers of the products of their blocks and columns."""
        return self._sum(F.linear(x, weight), lengths)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"{super().extra_repr()}"
        )


class ColumnParallelLinear(ParallelLinear):
    """Linear layer ``y = x W^T + b`` whose output features, the rows of ``W``, are split.

    Every worker has the full input, and computes a block of the output features, as
    :class:`RowParallelLinear` expects. With ``sequence_dim``, the input is a block of the sequence,
    of any length, and the layer gathers the blocks first.

    Initial values are those of the torch layer under the same seed. Workers outside ``P`` return a
    clone of their input.

    Args:
        P: partition of the workers.
        in_features, out_features, bias, device, dtype: as in torch's layer, with global sizes.
        axis: axis of ``P`` along which features are split; the other axes hold copies of the layer
            for other samples, whose parameter gradients are summed.
        gather_output: whether every worker gets all features.
        sequence_dim: dim of the input that is split over the same workers; ``None`` if it is whole.
        out_sizes: number of features of each worker's block, balanced by default; may be 0.
        convention: gradient convention of tensors that are the same on all workers.
            ``"invariant"``, as in Megatron: each copy has the whole gradient, as from a torch loss
            of the whole output; the gradients of the input are summed. ``"dual"``: the gradients of
            the copies of the output, and of the input, add up to the gradient.
        shape: agreement on the lengths of blocks of the sequence, if ``forward`` is not given them:
            once (``"static"``), or at every call (``"dynamic"``).

    Cost:
        With ``sequence_dim``, an all-gather of the input, and in backward a sum-scatter of its
        gradient. Otherwise no communication in forward and, with ``"invariant"``, an all-reduce of
        the input's gradient in backward. With ``gather_output``, also an all-gather of the output.

    Raises:
        ShapeError: the blocks or the input do not fit.
        ConventionError: the input has the other convention; see :func:`~gpudist.nn.invariant_copy`
            and :func:`~gpudist.nn.invariant_share`.
        PlanMismatch: lengths of blocks changed without being passed.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
    """

    def __init__(
        self,
        P: Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        axis: int = -1,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        out_sizes: Sequence[int] | None = None,
        convention: Convention = "invariant",
        shape: ShapeMode = "static",
    ) -> None:
        region = TensorRegion(type(self).__name__, P, axis, convention, shape)
        super().__init__(region, in_features, out_features, sequence_dim)
        self.gather_output = gather_output
        sizes = out_sizes if out_sizes is not None else Blocks(out_features, region.size).lengths
        self.out_sizes = tuple(sizes)
        self._make_parameters(self.out_sizes, 0, bias, device, dtype)

    def forward(self, x: torch.Tensor, lengths: Lengths | None = None) -> torch.Tensor:
        """Multiply the input by this worker's block of the weight.

        Args:
            x: input, or this worker's block of the sequence.
            lengths: lengths of all workers' blocks of the sequence, or their sum if they are
                balanced.

        Returns:
            This worker's block of the output features, for the whole sequence.
        """
        if not self.region.P.active:
            return x.clone()
        weight, *biases = self.own_parameters()
        y = self.multiply_whole(x, lengths, weight, biases[0] if biases else None)
        return self.region.whole(y, y.dim() - 1, self.out_sizes) if self.gather_output else y


class RowParallelLinear(ParallelLinear):
    """Linear layer ``y = x W^T + b`` whose input features, the columns of ``W``, are split.

    Every worker multiplies its block of the input features. The sum of these products, plus the
    bias, is the output, of which every worker holds a full copy or, with ``sequence_dim``, a block
    of the sequence.

    Initial values are those of the torch layer under the same seed. Every worker holds the bias.
    Workers outside ``P`` return a clone of their input.

    Args:
        P, in_features, out_features, bias, device, dtype, axis: see :class:`ColumnParallelLinear`.
        input_is_parallel: whether the input is a block of the features; otherwise every worker
            passes all features, and uses its block of them.
        sequence_dim: dim of the output to split over the same workers; ``None`` for a full copy on
            every worker.
        in_sizes: number of features of each worker's block, balanced by default; may be 0.
        convention: gradient convention of the output, and of an input that is not parallel; see
            :class:`ColumnParallelLinear`. ``"invariant"``: the gradients of the workers' copies of
            the output are the same, and count once. ``"dual"``: they are summed.

    Cost:
        An all-reduce of the output; in backward, no communication with ``"invariant"``, and another
        all-reduce with ``"dual"``. With ``sequence_dim``, a sum-scatter, and in backward an
        all-gather of the gradient.

    Raises:
        ShapeError: the blocks or the input do not fit.
        ConventionError: see :class:`ColumnParallelLinear`.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
    """

    def __init__(
        self,
        P: Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        axis: int = -1,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
        in_sizes: Sequence[int] | None = None,
        convention: Convention = "invariant",
    ) -> None:
        region = TensorRegion(type(self).__name__, P, axis, convention)
        super().__init__(region, in_features, out_features, sequence_dim)
        self.input_is_parallel = input_is_parallel
        sizes = in_sizes if in_sizes is not None else Blocks(in_features, region.size).lengths
        self.in_sizes = tuple(sizes)
        self._make_parameters(self.in_sizes, 1, bias, device, dtype)
        if self.bias is not None and region.is_invariant and sequence_dim is None:
            # The bias gradient is already equal along the line.
            self._holders = (self._holders[0], holders_of(self._placed["weight"]))

    def forward(self, x: torch.Tensor, lengths: Lengths | None = None) -> torch.Tensor:
        """Multiply by this worker's block of the weight, and sum over the workers.

        Args:
            x: this worker's block of the input features, for the whole sequence; or all features.
            lengths: lengths of the workers' blocks of the sequence, balanced by default.

        Returns:
            The output, or this worker's block of its sequence.
        """
        region = self.region
        if not region.P.active:
            return x.clone()
        if not self.input_is_parallel:
            self._require_features(x, self.in_features)
            x = region.own_block(x, x.dim() - 1, self.in_sizes)
        self._require_features(x, self.in_sizes[region.rank])
        weight, *biases = self.own_parameters()
        y = self.multiply_own(x, lengths, weight)
        return y + biases[0] if biases else y
