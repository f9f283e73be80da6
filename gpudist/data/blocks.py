"""Blocks of the samples of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from gpudist.checks.arguments import Checked, checked, describe, is_shape
from gpudist.data.crops import Crop
from gpudist.data.samples import ReadsRegions, Unread, as_tensor, map_arrays, of_arrays
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.world.partition import Partition


class BlockDataset(Checked, Dataset[Any]):
    """Dataset of blocks of samples, created by :func:`block_of`.

    Args:
        dataset, P_x: see :func:`block_of`.
    """

    def __init__(self, dataset: Any, P_x: Any) -> None:
        self._dataset = of_arrays("block_of", dataset)
        self._places = _places(P_x)
        if isinstance(dataset, ReadsRegions) and not isinstance(self._places, _Place):
            raise PartitionError(
                "block_of: a dataset with ReadsRegions has one array per sample, but P_x is "
                f"{P_x!r}; give one partition"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return map_arrays(_block, self._dataset[index], self._places, "block_of: P_x")


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


@dataclass(frozen=True)
class _Place:
    """Position of a worker on a partition, which, unlike a partition, can be sent to processes."""

    grid: tuple[int, ...]
    index: tuple[int, ...] | None


def _places(P_x: Any) -> Any:
    """Replace each partition in a nested structure by this worker's place on it."""
    if isinstance(P_x, Mapping):
        return {key: _places(P) for key, P in P_x.items()}
    if isinstance(P_x, list | tuple) and not is_shape(P_x):
        return [_places(P) for P in P_x]
    if P_x is None:
        return None
    if not isinstance(P_x, Partition):
        grid = f"P_world.grid({', '.join(map(str, P_x))})" if is_shape(P_x) else ""
        raise PartitionError(
            f"block_of: P_x is {describe(P_x)}; it takes a CartesianPartition, or a tuple, list "
            f"or mapping of them and None{grid and f'; create one with {grid}'}"
        )
    if P_x.dim < 2:
        raise PartitionError(
            f"block_of: a partition of shape {list(P_x.shape)} needs an axis for the batch and one "
            "for each dim of a sample; create one with P_world.grid, as P_world.grid(1, 1, "
            f"{P_x.size}, 1) for images"
        )
    return _Place(P_x.shape, P_x.index)


def _block(x: Any, place: _Place | None) -> Any:
    shape = tuple(x.shape)
    if place is None:
        # What nothing has read cannot be collated.
        is_read = not isinstance(x, Unread | Crop)
        return x if is_read else as_tensor(x[tuple(slice(0, n) for n in shape)])
    if len(shape) != len(place.grid) - 1:
        axes = len(place.grid) - 1
        raise ShapeError(
            f"block_of: a sample, or a part of it, of shape {list(shape)} has {len(shape)} dims, "
            f"expected {axes}, one for each axis of P_x of shape {list(place.grid)} but that of "
            f"the batch; add the missing dims, use a P_x with {len(shape) + 1} axes, or give each "
            "part of a sample its own partition, or None to leave it unpartitioned"
        )
    if place.index is None:
        return as_tensor(x[(slice(0, 0),) * len(shape)]).flatten()
    cut = Decomposition.balanced(shape, place.grid[1:])
    return as_tensor(x[cut.block(place.index[1:]).slices])
