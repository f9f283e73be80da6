"""Tensor-parallel linear layers: the weight cut by columns or by rows over a line of workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.nn.norm.line_blocks import balanced_lengths
from gpudist.nn.parameters.parameter import bias_bound, kaiming_bound, uniform_parameter
from gpudist.nn.parameters.replication import holders_of
from gpudist.nn.tensor_parallel.layer import ParallelLayer
from gpudist.nn.tensor_parallel.region import Convention, Lengths, TensorRegion
from gpudist.ops.agreement import ShapeMode, refuse
from gpudist.world.partition import Partition


class ParallelLinear(ParallelLayer):
    """A layer with the parameters of a linear one, in blocks of rows or of columns."""

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        region: TensorRegion,
        in_features: int,
        out_features: int,
        sequence_dim: int | None,
        overlap: bool,
    ) -> None:
        super().__init__(region, sequence_dim)
        self.overlap = overlap and sequence_dim is not None and region.size > 1
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
        """Blocks of the weight along ``dim``; the bias is cut with its rows, or whole."""
        shape, region = (self.out_features, self.in_features), self.region
        self._require_sizes(sizes, shape[dim], parts or region.size)
        placed = {"weight": region.placement(sizes, shape, dim, parts)}
        bound = kaiming_bound(self.in_features)
        self.weight = uniform_parameter(shape, bound, placed["weight"].own_box, device, dtype)
        self.bias = None
        if bias:
            placed["bias"] = region.placement(None if dim else sizes, shape[:1], 0, parts)
            bound, box = bias_bound(self.in_features), placed["bias"].own_box
            self.bias = uniform_parameter(shape[:1], bound, box, device, dtype)
        self._keep(**placed)

    def _require_sizes(self, sizes: Sequence[int], features: int, parts: int) -> None:
        if len(sizes) != parts or sum(sizes) != features or min(sizes) < 0:
            raise ShapeError(
                f"{self._name}: blocks of {list(sizes)} features do not cut {features} features "
                f"over {parts} workers"
            )

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
        """The product of the whole input with this worker's rows."""
        self._require_features(x, self.in_features)
        if self.sequence_dim is None:
            return F.linear(self.region.copy(x), weight, bias)
        dim = self._sequence_of(x)
        known = self.region.lengths(x, dim, lengths)
        if self.overlap:
            self.region.take_parts(x)
            products = self.region.products(x, dim, known)
            return self.region.marked(products.of_gathered(x, weight, bias))
        return F.linear(self.region.gather(x, dim, known), weight, bias)

    def multiply_own(
        self, x: torch.Tensor, lengths: Lengths | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """The sum of the products of the workers' blocks with their columns."""
        if not self.overlap:
            return self._sum(F.linear(x, weight), lengths)
        dim = self._sequence_of(x)
        known = self.region.lengths_of_whole(x, dim, lengths)
        shape = [*x.shape[:-1], self.out_features]
        shape[dim] = known[self.region.rank]
        block = x.new_empty(()).expand(shape)
        self.region.take_parts(x)
        products = self.region.products(block, dim, known)
        return self.region.marked(products.scattered(x, weight))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"{super().extra_repr()}"
        )


class ColumnParallelLinear(ParallelLinear):
    """``y = x W^T + b`` with the rows of ``W``, the output's features, cut over workers.

    Every worker has the whole input, and computes a block of the output's features from it; a
    :class:`RowParallelLinear` takes such blocks. With ``sequence_dim`` the input is a block of the
    sequence, of any length, and gathered first.

    Initial values are those of the torch layer under the same seed. Workers outside ``P`` get a
    clone of their input.

    Args:
        P: the workers.
        in_features, out_features, bias, device, dtype: as torch's layer, global sizes.
        axis: of ``P``, along which features are cut; along the others are copies of the layer for
            other samples, the gradients of whose parameters are summed.
        gather_output: every worker gets all features.
        sequence_dim: of the input that is cut over the same workers; none if it is whole.
        out_sizes: features of each worker's block, balanced unless given; may be 0.
        convention: of gradients of tensors that are the same on all workers. ``"invariant"``,
            Megatron's: each copy has the whole gradient, as torch's losses of the whole output give
            it; the gradients of the input are summed. ``"dual"``: those of the copies add up to the
            gradient, as the input's do then.
        shape: of blocks of the sequence: agreed on once (``"static"``), or at every call
            (``"dynamic"``), where ``forward`` is not given their lengths.
        overlap: with ``sequence_dim``, multiply each block of the sequence while the others are on
            their way; in backward likewise. Not in a graph of torch.compile.

    Cost:
        With ``sequence_dim`` an all-gather of the input; backward a sum-scatter of its gradient.
        Else none; backward, with ``"invariant"``, an all-reduce of the input's gradient. With
        ``gather_output`` an all-gather of the output too.

    Raises:
        ShapeError: the blocks or the input do not fit.
        ConventionError: the input is of the other convention; see
            :func:`~gpudist.nn.invariant_copy` and :func:`~gpudist.nn.invariant_share`.
        PlanMismatch: lengths of blocks changed unannounced.

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
        overlap: bool = False,
    ) -> None:
        region = TensorRegion(type(self).__name__, P, axis, convention, shape)
        super().__init__(region, in_features, out_features, sequence_dim, overlap)
        self.gather_output = gather_output
        sizes = out_sizes if out_sizes is not None else balanced_lengths(out_features, region.size)
        self.out_sizes = tuple(sizes)
        self._make_parameters(self.out_sizes, 0, bias, device, dtype)

    def forward(self, x: torch.Tensor, lengths: Lengths | None = None) -> torch.Tensor:
        """This worker's block of the output's features, of the whole sequence.

        Args:
            x: the input, or this worker's block of the sequence.
            lengths: of all workers' blocks of the sequence, or their sum if they are balanced.
        """
        if not self.region.P.active:
            return x.clone()
        weight, *biases = self.own_parameters()
        y = self.multiply_whole(x, lengths, weight, biases[0] if biases else None)
        return self.region.whole(y, y.dim() - 1, self.out_sizes) if self.gather_output else y


class RowParallelLinear(ParallelLinear):
    """``y = x W^T + b`` with the columns of ``W``, the input's features, cut over workers.

    Every worker multiplies its block of the input's features; the sum of these products, and the
    bias, is the output, whole on every worker. With ``sequence_dim`` each keeps a block of the
    sequence of it.

    Initial values are those of the torch layer under the same seed. Every worker holds the bias.
    Workers outside ``P`` get a clone of their input.

    Args:
        P, in_features, out_features, bias, device, dtype, axis: as of
            :class:`ColumnParallelLinear`.
        input_is_parallel: the input is a block of the features; else the whole, of which each
            worker takes its block.
        sequence_dim: of the output, to be cut over the same workers; none to keep it whole.
        in_sizes: features of each worker's block, balanced unless given; may be 0.
        convention: as of :class:`ColumnParallelLinear`; here of the output, and of an input that is
            not parallel. ``"invariant"``: the gradients that the workers give to their copies of
            the output are the same, and taken once. ``"dual"``: they are summed.
        overlap: as of :class:`ColumnParallelLinear`.

    Cost:
        An all-reduce of the output; backward none with ``"invariant"``, another with ``"dual"``.
        With ``sequence_dim`` a sum-scatter; backward an all-gather of the gradient.

    Raises:
        ShapeError: the blocks or the input do not fit.
        ConventionError: as of :class:`ColumnParallelLinear`.

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
        overlap: bool = False,
    ) -> None:
        region = TensorRegion(type(self).__name__, P, axis, convention)
        super().__init__(region, in_features, out_features, sequence_dim, overlap)
        self.input_is_parallel = input_is_parallel
        sizes = in_sizes if in_sizes is not None else balanced_lengths(in_features, region.size)
        self.in_sizes = tuple(sizes)
        self._make_parameters(self.in_sizes, 1, bias, device, dtype)
        if self.bias is not None and region.is_invariant and sequence_dim is None:
            # Its gradient is the same along the line already.
            self._holders = (self._holders[0], holders_of(self._placed["weight"]))

    def forward(self, x: torch.Tensor, lengths: Lengths | None = None) -> torch.Tensor:
        """The output, or this worker's block of the sequence of it.

        Args:
            x: this worker's block of the input's features, of the whole sequence; or all features.
            lengths: of the workers' blocks of the sequence, balanced unless given.
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
