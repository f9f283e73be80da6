"""Data loading in which every worker reads only its own blocks of its own samples.

The sampler partitions batches along axis 0. Samples have no batch dim, and are partitioned along
the other axes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Sampler, StackDataset, Subset

from gpudist.checks.arguments import Checked, checked, described
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.world.partition import CartesianPartition, Partition

__all__ = ["BlockDataset", "BlockSampler", "RandomCrops", "ReadsRegions", "block_of"]

# Changes a block with numbers of a generator, see RandomCrops.
Transform = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@runtime_checkable
class ReadsRegions(Protocol):
    """Protocol of datasets of arrays that can read parts of a sample.

    Datasets of torch may combine several: ``StackDataset(images, labels)`` for samples of parts
    with different readers, ``Subset`` and ``ConcatDataset``.
    """

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
        self._dataset = _of_arrays("block_of", dataset)
        self._places = _places(P_x)
        if isinstance(dataset, ReadsRegions) and not isinstance(self._places, _Place):
            raise PartitionError(
                "block_of: a dataset with ReadsRegions has one array per sample, but P_x is "
                f"{P_x!r}; give one partition"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return _map(_block, self._dataset[index], self._places, "block_of: P_x")


@checked()
def block_of(dataset: Any, P_x: Any) -> BlockDataset:
    """Return a view of ``dataset`` whose samples are this worker's blocks, for ``DataLoader``.

    Args:
        dataset: map-style dataset. Its samples are arrays that can be sliced like NumPy's, or
            tuples, lists or mappings of arrays. It may also implement :class:`ReadsRegions`, or be
            a :class:`RandomCrops`.
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
        ShapeError: when an item is read, if its parts do not fit the partitions in ``P_x``, or its
            dims their partition.
    """
    return BlockDataset(dataset, P_x)


class RandomCrops(Checked, Dataset[Any]):
    """Dataset of random crops of samples, which are equal on all workers.

    A crop depends on ``seed``, the epoch and its index alone. Pass the dataset to :func:`block_of`,
    which reads only this worker's cells of a crop: arrays of the samples are cut when it does.

    Args:
        dataset: dataset as :func:`block_of` takes it. In each sample, the last ``len(size)`` dims
            of all arrays must be equal; these are cropped.
        size: number of cells of a crop in each of these dims.
        crops_per_sample: number of crops of each sample in an epoch.
        flips: dims of ``size`` along which crops are mirrored, each in half of the crops.
        transform: function ``(block, generator) -> block`` that changes the values of a block when
            it is read, or one per part of a sample, with ``None`` for a part that is not changed.
            ``generator`` is in the same state on all workers and for all parts. A result must not
            depend on how the crop is partitioned: each cell may depend on its old value and on a
            fixed number of random numbers. The shape must stay.
        seed: seed of the crops; must be equal on all workers.

    Raises:
        ShapeError: if ``size``, ``flips`` or ``crops_per_sample`` is wrong; when an item is read,
            if its arrays have different dims or are smaller than a crop, or ``transform`` does
            not fit.
    """

    def __init__(
        self,
        dataset: Any,
        size: Sequence[int],
        *,
        crops_per_sample: int = 1,
        flips: Sequence[int] = (),
        transform: Transform
        | Sequence[Transform | None]
        | Mapping[str, Transform | None]
        | None = None,
        seed: int = 0,
    ) -> None:
        dims = len(size)
        if not dims or min(size) < 1 or crops_per_sample < 1:
            raise ShapeError(
                f"RandomCrops: size is {list(size)} and crops_per_sample {crops_per_sample}; both "
                "must be at least 1, and size needs a number for each dim to crop"
            )
        if any(not -dims <= dim < dims for dim in flips):
            raise ShapeError(
                f"RandomCrops: flips {list(flips)} must be dims of size {list(size)}: 0 to "
                f"{dims - 1}"
            )
        self._dataset = _of_arrays("RandomCrops", dataset)
        self._size, self._crops_per_sample = tuple(size), crops_per_sample
        self._flips = {dim % dims for dim in flips}
        self._transform, self._seed = transform, seed
        # Processes that load see a change, also if the loader keeps them for the next epoch.
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()

    @checked()
    def set_epoch(self, epoch: int) -> None:
        """Use the crops of epoch ``epoch``. Call it on every worker."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return self._crops_per_sample * len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        number = index // self._crops_per_sample
        sample = self._dataset[number]
        extents = self._extents(sample, f"RandomCrops, sample {number}")
        key = self._seed, int(self._epoch), index
        generator = _generator(*key)

        def draw(count: int) -> int:
            return int(torch.randint(count, (), generator=generator, device="cpu"))

        start = [draw(n - k + 1) for n, k in zip(extents, self._size, strict=True)]
        mirrored = [draw(2) == 1 and dim in self._flips for dim in range(len(start))]

        def crop(x: Any, transform: Any) -> _Crop:
            return _Crop(x, start, self._size, mirrored, transform, key)

        return _map(crop, sample, self._transform, "RandomCrops: transform")

    def _extents(self, sample: Any, where: str) -> tuple[int, ...]:
        """Return the extents in the dims to crop, which all arrays of a sample share."""
        dims, shapes = len(self._size), list[tuple[int, ...]]()
        _map(lambda x, _: shapes.append(tuple(x.shape)), sample, None, "")
        if not shapes:
            raise ShapeError(
                f"{where}: {described(sample)} has no array; its parts need a shape and slices, as "
                "arrays of NumPy, HDF5 and Zarr have, or its dataset the methods of ReadsRegions"
            )
        extents = {shape[-dims:] for shape in shapes}
        if len(extents) > 1 or len(shapes[0]) < dims:
            raise ShapeError(
                f"{where}: the arrays have shapes {', '.join(map(str, map(list, shapes)))}, but "
                f"their last {dims} dims must be equal for crops of size {list(self._size)}; "
                "resample to one grid, or give size fewer dims"
            )
        (found,) = extents
        for dim, (n, k) in enumerate(zip(found, self._size, strict=True)):
            if k > n:
                raise ShapeError(
                    f"{where}, dim {dim}: a crop has {k} cells, but {list(found)} has {n}; use a "
                    "smaller size, or pad the sample"
                )
        return found


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


def _of_arrays(where: str, dataset: Any) -> Any:
    """Return ``dataset`` with samples sliced like arrays, also of readers in torch's datasets."""
    if isinstance(dataset, ReadsRegions):
        return _Arrays(dataset)
    # Subclasses may have other state, which a copy would not share.
    if type(dataset) in (ConcatDataset, StackDataset, Subset):
        dataset = copy.copy(dataset)
        if isinstance(dataset, Subset):
            dataset.dataset = _of_arrays(where, dataset.dataset)
        elif isinstance(dataset.datasets, dict):
            parts = dataset.datasets.items()
            dataset.datasets = {name: _of_arrays(where, part) for name, part in parts}
        else:
            dataset.datasets = tuple(_of_arrays(where, part) for part in dataset.datasets)
        return dataset
    if not hasattr(dataset, "__getitem__"):
        methods = ("__len__", "shape_of", "read")
        lacking = " and ".join(name for name in methods if not hasattr(dataset, name))
        raise ShapeError(
            f"{where}: dataset is {described(dataset)}; it takes a map-style dataset, or one with "
            f"the methods of gpudist.data.ReadsRegions, of which this one lacks {lacking}"
        )
    return dataset


class _Arrays(Dataset[Any]):
    """Dataset of the samples of a reader, which nothing has read."""

    def __init__(self, reader: ReadsRegions) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> _Unread:
        return _Unread(self._reader, index)


class _Unread:
    """Sample of a dataset with :class:`ReadsRegions` that is sliced like an array."""

    def __init__(self, dataset: ReadsRegions, index: int) -> None:
        self._dataset, self._index = dataset, index

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._dataset.shape_of(self._index))

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        return self._dataset.read(self._index, box)


class _Crop:
    """Box in the last dims of an array, mirrored in some and changed, sliced like an array."""

    def __init__(
        self,
        array: Any,
        start: Sequence[int],
        size: Sequence[int],
        mirrored: Sequence[bool],
        transform: Any,
        key: tuple[int, ...],
    ) -> None:
        leading = tuple(array.shape[: -len(size)])
        self.shape = (*leading, *size)
        self._array, self._transform, self._key = array, transform, key
        self._start = (*[0] * len(leading), *start)
        self._mirrored = (*[False] * len(leading), *mirrored)

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        ranges = [
            (at + n - s.stop, at + n - s.start) if mirrored else (at + s.start, at + s.stop)
            for s, at, n, mirrored in zip(box, self._start, self.shape, self._mirrored, strict=True)
        ]
        block = self._array[tuple(slice(*ends) for ends in ranges)]
        dims = tuple(dim for dim, mirrored in enumerate(self._mirrored) if mirrored)
        if dims:
            block = block.flip(dims) if isinstance(block, torch.Tensor) else np.flip(block, dims)
        if self._transform is None:
            return block
        block = _as_tensor(block)
        shape = block.shape
        block = self._transform(block, _generator(*self._key, 1))
        if not isinstance(block, torch.Tensor) or block.shape != shape:
            raise ShapeError(
                f"RandomCrops: transform returned {described(block)} for a block of shape "
                f"{list(shape)}; it must return a tensor of that shape"
            )
        return block


def _generator(*key: int) -> torch.Generator:
    # Streams of different keys are independent; those of seeds that are sums would coincide.
    entropy = np.random.SeedSequence([number % 2**64 for number in key])
    return torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))


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


def _map(apply: Callable[[Any, Any], Any], sample: Any, given: Any, where: str) -> Any:
    """Replace each array in a sample by ``apply(array, entry)``.

    Args:
        given: entry of all arrays, or a structure with one for each part of the sample.
        where: name of ``given`` in the error if its parts are not those of the sample.
    """
    keys, known = _keys(sample), _keys(given)
    fits = keys is not None and known is not None and set(keys) <= set(known)
    if known is not None and not (fits if isinstance(given, Mapping) else keys == known):
        parts = described(sample) if keys is None else f"the parts {keys}"
        raise ShapeError(
            f"{where} has entries for the parts {known}, but a sample has {parts}; give each part "
            "an entry, which may be None"
        )
    if keys is None:
        return apply(sample, given) if len(getattr(sample, "shape", ())) else sample
    parts = [
        _map(apply, sample[key], given if known is None else given[key], where) for key in keys
    ]
    if isinstance(sample, Mapping):
        return dict(zip(keys, parts, strict=True))
    return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)


def _keys(x: Any) -> list[Any] | None:
    if isinstance(x, Mapping):
        return list(x)
    return list(range(len(x))) if isinstance(x, list | tuple) else None


def _block(x: Any, place: _Place | None) -> Any:
    shape = tuple(x.shape)
    if place is None:
        # What nothing has read cannot be collated.
        is_read = not isinstance(x, _Unread | _Crop)
        return x if is_read else _as_tensor(x[tuple(slice(0, n) for n in shape)])
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
    array = np.asarray(block)
    # Files may have the other order of bytes, which torch does not take.
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
