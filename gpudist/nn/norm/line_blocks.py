"""All-gathers and sums of blocks along one dim, on a line of workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.geometry.repartition import plan_all_gather
from gpudist.ops.bind_cache import BindCache
from gpudist.ops.shape_agreement import refuse
from gpudist.world.partition import Partition


class LineBlocks:
    """Movements of tensors that may be split along one dim over the workers of ``P``.

    Movements are bound once per shape, dim and block lengths, without communication.

    Args:
        P: workers in the order of their blocks, including this one.
        name: name of the layer or operator.
    """

    def __init__(self, P: Partition, name: str) -> None:
        assert P.rank is not None
        self.P, self._name = P, name
        self._rank = P.rank
        self._gathers = BindCache[Movement]("static")
        self._totals = BindCache[Movement]("static")

    def gather(self, block: torch.Tensor, dim: int, lengths: Sequence[int]) -> Movement:
        """Return the all-gather along ``dim`` of blocks with these lengths."""
        return self._gathers(block, self._bind_gather, dim, *lengths)

    def sum_scatter(self, whole: torch.Tensor, dim: int, lengths: Sequence[int]) -> Movement:
        """Return the sum of whole tensors, split along ``dim`` into blocks of these lengths."""
        return self._gathers(whole, self._bind_gather, dim, *lengths).T

    def total(self, x: torch.Tensor) -> Movement:
        """Return the sum of equally shaped tensors, on every worker."""
        return self._totals(x, self._bind_total)

    def require_lengths(
        self, x: torch.Tensor, dim: int, lengths: int | Sequence[int] | None, is_whole: bool
    ) -> tuple[int, ...]:
        """Return the lengths of all blocks along ``dim``, balanced by default.

        Args:
            x: block or whole tensor.
            dim: dim that is split.
            lengths: lengths of all blocks by rank, or their sum if they are balanced.
            is_whole: whether ``x`` is the whole tensor.

        Raises:
            ShapeError: ``x`` does not fit the lengths; the other workers raise the error at their
                next wait.
        """
        extent, parts = x.shape[dim], self.P.size
        total = extent if lengths is None else lengths
        block_lengths = Blocks(total, parts).lengths if isinstance(total, int) else tuple(total)
        if len(block_lengths) == parts and extent == (
            sum(block_lengths) if is_whole else block_lengths[self._rank]
        ):
            return block_lengths
        what = "tensor" if is_whole else "block"
        refuse(
            self.P,
            ShapeError(
                f"{self._name}: the {what} of rank {self._rank} of {parts} has {extent} cells in "
                f"dim {dim}, but lengths are {list(block_lengths)}; pass the lengths of all blocks"
            ),
        )

    def _bind_gather(self, x: torch.Tensor, dim: int, *lengths: int) -> Movement:
        cuts = [Blocks(extent, 1) for extent in x.shape]
        index = [0] * len(cuts)
        cuts[dim], index[dim] = Blocks.of_sizes(lengths), self._rank
        cut = Decomposition(tuple(cuts))
        label = f"{self._name}: all_gather along dim {dim} of blocks {list(lengths)}"
        plan = plan_all_gather(cut, [dim], index)
        return bind(plan, self.P, label, x.dtype, cut.block(index).shape, x.dtype)

    def _bind_total(self, x: torch.Tensor) -> Movement:
        shape, size = tuple(x.shape), self.P.size
        plan = plan_all_sum_reduce(self._rank, range(size), shape, ("total", size, shape))
        return bind(plan, self.P, f"{self._name}: sum over {size}", x.dtype, shape, x.dtype)
