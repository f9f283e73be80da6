"""Random crops of samples, equal on all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from gpudist.checks.arguments import Checked, checked, describe
from gpudist.data.samples import as_tensor, map_arrays, of_arrays
from gpudist.errors import ShapeError

# Changes a block with numbers of a generator, see RandomCrops.
Transform = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


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
        self._dataset = of_arrays("RandomCrops", dataset)
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

        def crop(x: Any, transform: Any) -> Crop:
            return Crop(x, start, self._size, mirrored, transform, key)

        return map_arrays(crop, sample, self._transform, "RandomCrops: transform")

    def _extents(self, sample: Any, where: str) -> tuple[int, ...]:
        """Return the extents in the dims to crop, which all arrays of a sample share."""
        dims, shapes = len(self._size), list[tuple[int, ...]]()
        map_arrays(lambda x, _: shapes.append(tuple(x.shape)), sample, None, "")
        if not shapes:
            raise ShapeError(
                f"{where}: {describe(sample)} has no array; its parts need a shape and slices, as "
                "arrays of NumPy, HDF5 and Zarr have, or its dataset the methods of ReadsRegions"
            )
        extents = {shape[-dims:] for shape in shapes}
        if len(extents) > 1 or len(shapes[0]) < dims:
            raise ShapeError(
                f"{where}: the arrays have shapes {', '.join(map(str, map(list, shapes)))}, but "
                f"their last {dims} dims must be equal for crops of size {list(self._size)}; "
                "resample to one grid, or give size fewer dims"
            )
        (common,) = extents
        for dim, (n, k) in enumerate(zip(common, self._size, strict=True)):
            if k > n:
                raise ShapeError(
                    f"{where}, dim {dim}: a crop has {k} cells, but {list(common)} has {n}; use a "
                    "smaller size, or pad the sample"
                )
        return common


class Crop:
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
        block = as_tensor(block)
        shape = block.shape
        block = self._transform(block, _generator(*self._key, 1))
        if not isinstance(block, torch.Tensor) or block.shape != shape:
            raise ShapeError(
                f"RandomCrops: transform returned {describe(block)} for a block of shape "
                f"{list(shape)}; it must return a tensor of that shape"
            )
        return block


def _generator(*key: int) -> torch.Generator:
    # Streams of different keys are independent; those of seeds that are sums would coincide.
    entropy = np.random.SeedSequence([number % 2**64 for number in key])
    return torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
