"""Random crops and augmentation: every worker reads its block of the crop that all workers draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset

from gpudist.data import RandomCrops, block_of
from gpudist.errors import ShapeError
from gpudist.world.partition import Partition
from tests.data.test_blocks import Counted
from tests.nn.compare import grid, own_slices
from tests.pool import distributed

SHAPE, SIZE = (7, 6, 9), (4, 5, 3)


def cells(number: int, channels: int = 0) -> np.ndarray[Any, Any]:
    """Return an array whose cells hold their position, after ``1000 * number``."""
    array = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + 1000 * number
    return np.stack([array + 0.5 * i for i in range(channels)]) if channels else array


class Labels:
    """Reader of regions whose labels have other values than the images."""

    def __len__(self) -> int:
        return 3

    def shape_of(self, index: int) -> tuple[int, ...]:
        return SHAPE

    def read(self, index: int, box: tuple[slice, ...]) -> torch.Tensor:
        return torch.from_numpy(cells(index)[box]).long()


def pairs() -> StackDataset[Any]:
    """Return samples with two readers: arrays that are sliced, and regions."""
    images: Any = [Counted(cells(i, channels=2)) for i in range(3)]
    labels: Any = Labels()
    return StackDataset(image=images, label=labels)


def brighten(block: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return block * (1 + torch.rand((), generator=generator))


def whole(crop: Any) -> torch.Tensor:
    """Return all cells of a crop."""
    found = crop[tuple(slice(0, n) for n in crop.shape)]
    return found if isinstance(found, torch.Tensor) else torch.from_numpy(found.copy())


@distributed(ranks=6, transports=["loopback"])
def test_blocks_of_equal_crops(P_world: Partition) -> None:
    crops = RandomCrops(
        pairs(), SIZE, crops_per_sample=5, flips=(0, -1), seed=3,
        transform={"image": brighten, "label": None},
    )  # fmt: skip
    P_x = {"image": grid(P_world, [1, 1, 2, 1, 2]), "label": grid(P_world, [1, 3, 2, 1])}
    assert len(crops) == 15
    corners, mirrored, gains = set[int](), set[tuple[int, ...]](), set[float]()
    for epoch, index in ((0, 0), (0, 1), (0, 4), (0, 5), (0, 14), (7, 0), (7, 1), (7, 14)):
        crops.set_epoch(epoch)
        own = block_of(crops, P_x)[index]
        image, label = (whole(crops[index][part]) for part in ("image", "label"))
        for part, crop in (("image", image), ("label", label)):
            where = own_slices((1, *crop.shape), P_x[part])
            expected = crop[where[1:]] if where else crop.flatten()[:0]
            assert torch.equal(own[part], expected)
        # The label is the number and position of a cell, before 0.5 per channel and the gain.
        corner = int(label.min()) - 1000 * (index // 5)
        a, b, c = np.unravel_index(corner, SHAPE)
        steps = [int(label.select(d, 1).flatten()[0] - label.flatten()[0]) for d in range(3)]
        flipped = tuple(dim for dim in range(3) if steps[dim] < 0)
        box = np.s_[a : a + 4, b : b + 5, c : c + 3]
        assert np.array_equal(np.flip(cells(index // 5)[box], flipped), label)
        gain = image / torch.stack([label, label + 0.5])
        gain = gain[label.expand_as(gain) > 0]
        assert gain.max() - gain.min() < 1e-5 and 1 <= gain.min() <= gain.max() <= 2
        corners.add(corner)
        mirrored.add(flipped)
        gains.add(round(float(gain.mean()), 4))
    assert len(corners) > 4 and len(gains) == 8
    assert mirrored <= {(), (0,), (2,), (0, 2)} and len(mirrored) > 1


@distributed(ranks=3, transports=["loopback"])
def test_only_the_own_cells_of_a_crop_are_read(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 1, 1, 2])
    lazy = Counted(cells(0, channels=2))
    block = block_of(RandomCrops([lazy], SIZE, flips=[2]), P_x)[0]
    assert P_world.rank is not None
    assert lazy.cells == block.numel() == [80, 40, 0][P_world.rank]


@distributed(ranks=1, transports=["loopback"])
def test_readers_within_datasets_of_torch(P_world: Partition) -> None:
    P = grid(P_world, [1] * 4)
    labels: Any = Labels()
    whole = torch.from_numpy(cells(1)).long()
    for dataset, index in (
        (Subset(labels, [2, 1]), 1),
        (ConcatDataset([labels, labels]), 4),
        (Subset(ConcatDataset([Subset(labels, [0]), labels]), [2]), 0),
    ):
        assert torch.equal(block_of(dataset, P)[index], whole)
    image, label = block_of(StackDataset(labels, Subset(labels, [1, 1, 1])), (P, None))[1]
    assert torch.equal(image, whole) and torch.equal(label, whole)
    assert isinstance(labels, Labels)
    half = block_of(Subset(RandomCrops(labels, SIZE), [1]), P)
    assert torch.equal(half[0], block_of(RandomCrops(labels, SIZE), P)[1])


def test_processes_that_stay_see_the_next_epoch() -> None:
    crops = RandomCrops([cells(0)], SIZE)
    loader = DataLoader(
        crops, num_workers=1, persistent_workers=True, multiprocessing_context="fork",
        collate_fn=_first_cells,
    )  # fmt: skip
    found = list[float]()
    for epoch in range(6):
        crops.set_epoch(epoch)
        found += list(loader)
    assert len(set(found)) > 2


def _first_cells(samples: list[Any]) -> float:
    return float(samples[0][tuple(slice(0, n) for n in SIZE)].flat[0])


@distributed(ranks=1, transports=["loopback"])
def test_what_does_not_fit_is_refused(P_world: Partition) -> None:
    P = grid(P_world, [1] * 4)
    short: Any = [(cells(0), cells(0)[:, :, :8])]
    with pytest.raises(ShapeError, match=r"sample 0: the arrays have shapes \[7, 6, 9\], \[7, 6, "):
        RandomCrops(short, SIZE)[0]
    with pytest.raises(ShapeError, match=r"sample 1, dim 1: a crop has 7 cells, but \[7, 6, 9\] h"):
        RandomCrops([cells(0)] * 2, (4, 7, 3))[1]
    with pytest.raises(ShapeError, match=r"sample 0: 'a.nii' .* has no array; its parts need a sh"):
        RandomCrops(["a.nii"], SIZE)[0]
    with pytest.raises(ShapeError, match=r"arrays have shapes \[7, 6, 9\], but their last 4 dims"):
        RandomCrops([cells(0)], (1, *SIZE))[0]
    with pytest.raises(ShapeError, match=r"dataset is .*; it takes a map-style .* lacks shape_of"):
        RandomCrops({1, 2}, SIZE)
    with pytest.raises(ShapeError, match=r"size is \[4, 0\] and crops_per_sample 1; both must"):
        RandomCrops([cells(0)], (4, 0))
    with pytest.raises(ShapeError, match=r"flips \[3\] must be dims of size \[4, 5, 3\]: 0 to 2"):
        RandomCrops([cells(0)], SIZE, flips=[3])
    with pytest.raises(ShapeError, match="transform is 'noise'"):
        RandomCrops([cells(0)], SIZE, transform="noise")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"transform has entries for the parts \[0, 1\], but"):
        RandomCrops([cells(0)], SIZE, transform=(brighten, None))[0]
    reshaping = RandomCrops([cells(0)], SIZE, transform=lambda block, generator: block[None])
    with pytest.raises(ShapeError, match=r"returned a torch.Tensor of shape .* of shape \[4, 5, 3"):
        block_of(reshaping, P)[0]


def _nifti(path: Path, array: Any) -> Callable[[], Any]:
    nibabel = pytest.importorskip("nibabel")
    # The order of bytes that torch does not take.
    header = nibabel.Nifti1Header(endianness=">")
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4), header), path / "a.nii")
    return lambda: nibabel.load(path / "a.nii").dataobj


def _zarr(path: Path, array: Any) -> Callable[[], Any]:
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    stored = zarr.create_array(path / "a.zarr", shape=SHAPE, chunks=(4, 4, 4), dtype=array.dtype)
    stored[:] = array
    return lambda: zarr.open_array(path / "a.zarr", mode="r")


def _hdf5(path: Path, array: Any) -> Callable[[], Any]:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(path / "a.h5", "w") as file:
        file.create_dataset("cells", data=array, chunks=(4, 4, 4))
    return lambda: h5py.File(path / "a.h5")["cells"]


def _memory_map(path: Path, array: Any) -> Callable[[], Any]:
    np.save(path / "a.npy", array.astype(">f4"))
    return lambda: np.load(path / "a.npy", mmap_mode="r")


@pytest.mark.parametrize("write", [_nifti, _zarr, _hdf5, _memory_map])
def test_formats(write: Callable[[Path, Any], Callable[[], Any]], tmp_path: Path) -> None:
    from gpudist.testing import run_distributed

    open_array = write(tmp_path, cells(0))
    run_distributed(_check_format, 2, open_array)


def _check_format(P_world: Partition, open_array: Callable[[], Any]) -> None:
    assert P_world.rank is not None
    P_x = grid(P_world, [1, 1, 2, 1])
    whole = RandomCrops([cells(0)], SIZE, flips=(0, 1, 2), crops_per_sample=4)
    stored = RandomCrops([open_array()], SIZE, flips=(0, 1, 2), crops_per_sample=4)
    for index in range(4):
        block = block_of(stored, P_x)[index]
        assert block.dtype == torch.float32 and block.shape == (4, [3, 2][P_world.rank], 3)
        assert torch.equal(block, block_of(whole, P_x)[index])
