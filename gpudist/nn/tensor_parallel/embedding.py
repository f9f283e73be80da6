"""Vocabulary-parallel embedding: the rows of the table split over a line of workers."""

from __future__ import annotations

import torch

from gpudist.geometry.blocks import Blocks
from gpudist.nn.affine.embedding import TableLayer, padding_row, rows_of_block
from gpudist.nn.parameters.parameter import normal_parameter
from gpudist.nn.partitions import require_cells
from gpudist.nn.tensor_parallel.parallel_layer import ParallelLayer
from gpudist.nn.tensor_parallel.region import Convention, Lengths, TensorRegion
from gpudist.world.partition import Partition


class VocabParallelEmbedding(TableLayer, ParallelLayer):
    """Look up rows of a table ``[num_embeddings, embedding_dim]`` split by rows over workers.

    Every worker has all indices and looks up the rows it holds. The sum of the results is the
    output, of which every worker holds a full copy or, with ``sequence_dim``, a block of the
    sequence.

    Initial values are those of the torch layer under the same seed. Workers outside ``P`` return a
    clone of their input.

    Args:
        P: partition of the workers; along ``axis``, at most as many as rows.
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in torch's layer, with global
            sizes.
        axis, convention: see :class:`~gpudist.nn.RowParallelLinear`.
        sequence_dim: dim of the output to split over the same workers; ``None`` for a full copy on
            every worker.

    Cost:
        See :class:`~gpudist.nn.RowParallelLinear`.

    Raises:
        ShapeError: there are more workers than rows; on a CPU, on every worker, if an index is not
            in the table.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053.
    """

    def __init__(
        self,
        P: Partition,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        axis: int = -1,
        sequence_dim: int | None = None,
        convention: Convention = "invariant",
    ) -> None:
        region = TensorRegion(self._name, P, axis, convention)
        super().__init__(region, sequence_dim)
        self._P_inputs = region.P
        require_cells(self._name, 0, region.size, num_embeddings, "embeddings")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_row(self._name, padding_idx, num_embeddings)
        shape = num_embeddings, embedding_dim
        sizes = Blocks(num_embeddings, region.size).lengths
        placed = region.placement(sizes, shape, 0)
        self._first = sum(sizes[: region.rank])
        self.weight = normal_parameter(shape, placed.own_box, device, dtype)
        self._clear_padding(self._first)
        self._place(True, {"weight": placed}, region.P)

    def forward(self, input: torch.Tensor, lengths: Lengths | None = None) -> torch.Tensor:
        """Look up the rows that this worker holds, and sum over the workers.

        Args:
            input: all indices, the same on all workers.
            lengths: lengths of the workers' blocks of the sequence, balanced by default.

        Returns:
            The output, or this worker's block of its sequence.
        """
        if not self.region.P.active:
            return input.clone()
        self._require_indices(input)
        (weight,) = self.own_parameters()
        return self._sum(rows_of_block(input, weight, self._first, self.padding_idx), lengths)

    def extra_repr(self) -> str:
        padding = f"padding_idx={self.padding_idx}, " if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, {padding}{super().extra_repr()}"
