"""Data loading in which every worker reads only its own blocks of its own samples.

The sampler partitions batches along axis 0. Samples have no batch dim, and are partitioned along
the other axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from gpudist.checks.arguments import Checked, checked, described
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.world.partition import CartesianPartition, Partition

__all__ = ["BlockDataset", "BlockSampler", "ReadsRegions", "block_of"]


@runtime_checkable
class ReadsRegions(Protocol):
    """Protocol of datasets of arrays that can read parts of a sample."""

    def __len__(self) -> int: ...

    def shape_of(self, index: int) -> Sequence[int]:
        """Return the shape of sample ``index``, without the batch dim."""
        ...

    def read(self, index: int, box: tuple[slice, ...]) -> Any:
        """Return the cells of sample ``index`` in ``box``, one slice per dim."""
        ...


class BlockDataset(Checked, Dataset[Any]):
    """Dataset of blocks of samples, created by :func:`block_of`.

    Args:
        dataset, P_x: see :func:`block_of`.
    """

    def __init__(self, dataset: Any, P_x: Any) -> None:
        if not hasattr(dataset, "__getitem__") and not isinstance(dataset, ReadsRegions):
            raise ShapeError(
                f"block_of: dataset is {described(dataset)}; it takes a map-style dataset"
            )
        self._dataset = dataset
        self._places = _places(P_x)
        if isinstance(dataset, ReadsRegions) and not isinstance(self._places, _Place):
            raise PartitionError(
                "block_of: a dataset with ReadsRegions has one array per sample, but P_x is "
                f"{P_x!r}; give one partition"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self._dataset, ReadsRegions):
            return _cut(_Unread(self._dataset, index), self._places)
        return _cut(self._dataset[index], self._places)


@checked()
def block_of(dataset: Any, P_x: Any) -> BlockDataset:
    """Return a view of ``dataset`` whose samples are this worker's blocks, for ``DataLoader``.

    Args:
        dataset: map-style dataset. Its samples are arrays that can be sliced like NumPy's, or
            tuples, lists or mappings of arrays. It may also implement :class:`ReadsRegions`.
        P_x: partition of the batched tensors, one axis per dim, the batch first. A tuple, list or
            mapping gives each part of a sample its own partition, or ``None`` to leave it
            unpartitioned.

    Returns:
        View of the dataset. Arrays become tensors: balanced blocks along all axes but the first.
        Numbers and strings are unchanged. Workers outside ``P_x`` get tensors of shape ``(0,)``,
        which collate to zero-volume placeholders.

    Cost:
        No messages. Arrays that are sliced lazily, such as memory maps and HDF5 datasets, and
        datasets with :class:`ReadsRegions` read only this worker's cells.

    Raises:
        PartitionError: a partition has fewer than two axes, or several partitions are given for a
            dataset with :class:`ReadsRegions`.
        ShapeError: when an item is read, if its dims do not fit its partition.
    """
    return BlockDataset(dataset, P_x)


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


class _Unread:
    """Sample of a dataset with :class:`ReadsRegions` that is sliced like an array."""

    def __init__(self, dataset: ReadsRegions, index: int) -> None:
        self._dataset, self._index = dataset, index

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._dataset.shape_of(self._index))

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        return self._dataset.read(self._index, box)


@dataclass(frozen=True)
class _Place:
    """Position of a worker on a partition, which, unlike a partition, can be sent to processes."""

    grid: tuple[int, ...]
    index: tuple[int, ...] | None


def _places(P_x: Any) -> Any:
    """Replace each partition in a nested structure by this worker's place on it."""
    if isinstance(P_x, Mapping):
        return {key: _places(P) for key, P in P_x.items()}
    if isinstance(P_x, list | tuple):
        return [_places(P) for P in P_x]
    if P_x is None:
        return None
    if not isinstance(P_x, Partition):
        raise PartitionError(
            f"block_of: P_x is {described(P_x)}; it takes a CartesianPartition, or a tuple, list "
            "or mapping of them and None"
        )
    if P_x.dim < 2:
        raise PartitionError(
            f"block_of: a partition of shape {list(P_x.shape)} needs an axis for the batch and one "
            "for each dim of a sample"
        )
    return _Place(P_x.shape, P_x.index)


def _cut(sample: Any, place: Any) -> Any:
    """Replace each array in a sample by this worker's block of it."""
    if place is None:
        return sample
    if isinstance(sample, Mapping):
        given = place if isinstance(place, dict) else dict.fromkeys(sample, place)
        return {key: _cut(x, given[key]) for key, x in sample.items()}
    if isinstance(sample, list | tuple):
        given = place if isinstance(place, list) else [place] * len(sample)
        parts = [_cut(x, one) for x, one in zip(sample, given, strict=True)]
        return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)
    if len(getattr(sample, "shape", ())) == 0:
        return sample
    return _block(sample, place)


def _block(x: Any, place: _Place) -> torch.Tensor:
    shape = tuple(x.shape)
    if len(shape) != len(place.grid) - 1:
        raise ShapeError(
            f"block_of: a part of shape {list(shape)} of a sample does not fit the partition of "
            f"shape {list(place.grid)}, which has an axis for the batch and {len(place.grid) - 1} "
            "more; give each part its own partition, or None to leave it unpartitioned"
        )
    if place.index is None:
        return _as_tensor(x[(slice(0, 0),) * len(shape)]).flatten()
    cut = Decomposition.balanced(shape, place.grid[1:])
    return _as_tensor(x[cut.block(place.index[1:]).slices])


def _as_tensor(block: Any) -> torch.Tensor:
    # Copy, so that the rest of the sample is neither kept in memory nor sent to another process.
    if isinstance(block, torch.Tensor):
        return block.clone()
    return torch.from_numpy(np.array(block))
