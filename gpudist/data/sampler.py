"""Batch sampler of one worker of a partition."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from gpudist.checks.arguments import Checked, checked
from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks
from gpudist.world.partition import CartesianPartition


class BlockSampler(Checked, Sampler[list[int]]):
    """Batch sampler that yields this worker's part of each global batch.

    Pass it as ``DataLoader(..., batch_sampler=...)``. Every worker shuffles in the same order as
    ``torch.utils.data.DistributedSampler`` with one replica, so the global batches are those of a
    single process. Each global batch is partitioned into balanced blocks along axis 0 of ``P_x``.

    Args:
        length: number of samples in the dataset.
        P_x: partition of the batched tensors; axis 0 partitions the batch.
        batch_size: number of samples in a global batch.
        shuffle: whether to shuffle in each epoch, see :meth:`set_epoch`.
        seed: seed of the shuffle; must be equal on all workers.
        drop_last: whether to drop a smaller last batch. If it is kept, its blocks are balanced too;
            if axis 0 is partitioned, layers need ``shape="dynamic"`` to accept them.

    Raises:
        ShapeError: on every worker alike, if a batch has fewer samples than axis 0 has workers.
    """

    def __init__(
        self,
        length: int,
        P_x: CartesianPartition,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ShapeError(f"BlockSampler: batch_size {batch_size} must be at least 1")
        self._length, self._batch_size = length, batch_size
        self._rows, self._row = P_x.shape[0], P_x.index[0] if P_x.index is not None else 0
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0
        last = length % batch_size
        self._stop = length - last if drop_last else length
        smallest = batch_size if drop_last else last or batch_size
        if smallest < self._rows:
            remedy = "drop_last=True" if batch_size >= self._rows else "a larger batch_size"
            raise ShapeError(
                f"BlockSampler, dim 0: a batch has {smallest} samples, but P_x of shape "
                f"{list(P_x.shape)} has {self._rows} rows, each of which needs a sample; use "
                f"{remedy}"
            )

    @checked()
    def set_epoch(self, epoch: int) -> None:
        """Use the shuffle of epoch ``epoch``. Call it on every worker."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches, which is equal on all workers."""
        return -(-self._stop // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for start in range(0, self._stop, self._batch_size):
            batch = order[start : min(start + self._batch_size, self._stop)]
            first, last = Blocks(len(batch), self._rows).block(self._row)
            yield batch[first:last]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(self._length, generator=generator).tolist()  # pyright: ignore
        return order
