"""Samples of datasets as arrays that are read when they are sliced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from gpudist.checks.arguments import describe
from gpudist.errors import ShapeError


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


def of_arrays(where: str, dataset: Any) -> Any:
    """Return ``dataset`` with samples sliced like arrays, also of readers in torch's datasets."""
    if isinstance(dataset, ReadsRegions):
        return Arrays(dataset)
    # Subclasses may have other state, which a copy would not share.
    if type(dataset) in (ConcatDataset, StackDataset, Subset):
        dataset = copy.copy(dataset)
        if isinstance(dataset, Subset):
            dataset.dataset = of_arrays(where, dataset.dataset)
        elif isinstance(dataset.datasets, dict):
            parts = dataset.datasets.items()
            dataset.datasets = {name: of_arrays(where, part) for name, part in parts}
        else:
            dataset.datasets = tuple(of_arrays(where, part) for part in dataset.datasets)
        return dataset
    if not hasattr(dataset, "__getitem__"):
        methods = ("__len__", "shape_of", "read")
        lacking = " and ".join(name for name in methods if not hasattr(dataset, name))
        raise ShapeError(
            f"{where}: dataset is {describe(dataset)}; it takes a map-style dataset, with __len__ "
            f"and __getitem__, or one with the methods of gpudist.data.ReadsRegions, of which this "
            f"one lacks {lacking}"
        )
    return dataset


class Arrays(Dataset[Any]):
    """Dataset of the samples of a reader, which nothing has read."""

    def __init__(self, reader: ReadsRegions) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Unread:
        return Unread(self._reader, index)


class Unread:
    """Sample of a dataset with :class:`ReadsRegions` that is sliced like an array."""

    def __init__(self, dataset: ReadsRegions, index: int) -> None:
        self._dataset, self._index = dataset, index

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._dataset.shape_of(self._index))

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        return self._dataset.read(self._index, box)


def map_arrays(apply: Callable[[Any, Any], Any], sample: Any, entries: Any, where: str) -> Any:
    """Replace each array in a sample by ``apply(array, entry)``.

    Args:
        entries: entry of all arrays, or a structure with one for each part of the sample.
        where: name of ``entries`` in the error if its parts are not those of the sample.
    """
    keys, known = _keys(sample), _keys(entries)
    fits = keys is not None and known is not None and set(keys) <= set(known)
    if known is not None and not (fits if isinstance(entries, Mapping) else keys == known):
        parts = describe(sample) if keys is None else f"the parts {keys}"
        raise ShapeError(
            f"{where} has entries for the parts {known}, but a sample has {parts}; give each part "
            "an entry, which may be None"
        )
    if keys is None:
        return apply(sample, entries) if len(getattr(sample, "shape", ())) else sample
    parts = [
        map_arrays(apply, sample[key], entries if known is None else entries[key], where)
        for key in keys
    ]
    if isinstance(sample, Mapping):
        return dict(zip(keys, parts, strict=True))
    return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)


def _keys(x: Any) -> list[Any] | None:
    if isinstance(x, Mapping):
        return list(x)
    return list(range(len(x))) if isinstance(x, list | tuple) else None


def as_tensor(block: Any) -> torch.Tensor:
    # Copy, so that the rest of the sample is neither kept in memory nor sent to another process.
    if isinstance(block, torch.Tensor):
        return block.clone()
    array = np.asarray(block)
    # Files may have the other order of bytes, which torch does not take.
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
