"""Every worker loads its own blocks of its own samples: together, those that one process loads."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from gpudist.data import BlockSampler, block_of
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import grid, own_slices
from tests.pool import distributed

SHAPE = (2, 7, 5)


class Sample(NamedTuple):
    image: Any
    mask: Any
    label: int


class Images(Dataset[Any]):
    """Samples whose cells hold their number and position."""

    def __init__(self, length: int, shape: Sequence[int] = SHAPE) -> None:
        self.length, self.shape = length, tuple(shape)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        size = int(np.prod(self.shape))
        return torch.arange(size).view(self.shape) + 1000.0 * index


class Labelled(Images):
    def __getitem__(self, index: int) -> Any:
        image = super().__getitem__(index)
        return Sample(image.numpy(), image[0] > 3, index % 3)


class Counted:
    """An array as of a file: slices alone are read, and counted."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        self._x, self.shape, self.cells = x, x.shape, 0

    def __getitem__(self, box: Any) -> np.ndarray[Any, Any]:
        found = self._x[box]
        self.cells += found.size
        return found


class Regions:
    """Reads regions, and keeps note of the cells that were read."""

    def __init__(self, images: Images) -> None:
        self._images, self.cells = images, 0

    def __len__(self) -> int:
        return len(self._images)

    def shape_of(self, index: int) -> Sequence[int]:
        return self._images.shape

    def read(self, index: int, box: tuple[slice, ...]) -> torch.Tensor:
        found = self._images[index][box]
        self.cells += found.numel()
        return found


def sequential(dataset: Any, batch_size: int, epoch: int, **options: Any) -> DataLoader[Any]:
    """Torch's own loader of whole batches, shuffled as its sampler for one replica does."""
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=True, seed=5)
    sampler.set_epoch(epoch)
    return DataLoader(dataset, batch_size, sampler=sampler, **options)


@pytest.mark.parametrize(("shape", "batch_size"), [([2, 1, 3, 1], 5), ([1, 1, 2, 2], 4)], ids=str)
@pytest.mark.parametrize("drop_last", [False, True])
@distributed(ranks=7, transports=["loopback"])
def test_blocks_of_the_batches_of_one_process(
    P_world: Partition, shape: Sequence[int], batch_size: int, drop_last: bool
) -> None:
    """The last batch is smaller; some workers load placeholders, in as many batches."""
    P_x = grid(P_world, shape)
    images = Images(18)
    sampler = BlockSampler(len(images), P_x, batch_size, shuffle=True, seed=5, drop_last=drop_last)
    loader = DataLoader(block_of(images, P_x), batch_sampler=sampler)
    orders: list[float] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wholes = list(sequential(images, batch_size, epoch, drop_last=drop_last))
        blocks = list(loader)
        assert len(loader) == len(sampler) == len(blocks) == len(wholes)
        for whole, block in zip(wholes, blocks, strict=True):
            where = own_slices(whole.shape, P_x)
            if where is not None:
                assert torch.equal(block, whole[where])
            else:
                assert block.shape[1:] == (0,)
                assert len(block) == len(whole) or P_x.shape[0] > 1
        orders.append(float(wholes[0][0, 0, 0, 0]))
    assert orders[0] != orders[1]


@distributed(ranks=2, transports=["host"])
def test_view_can_be_sent_to_processes_that_load(P_world: Partition) -> None:
    """It has no part in the transport."""
    P_x = grid(P_world, [1, 1, 2, 1])
    view = block_of(Images(3), P_x)
    sent = pickle.loads(pickle.dumps(view))
    assert len(sent) == 3 and torch.equal(sent[1], view[1])


@distributed(ranks=3, transports=["loopback"])
def test_parts_of_a_sample_have_partitions_of_their_own(P_world: Partition) -> None:
    P_x, P_mask = grid(P_world, [1, 1, 2, 1]), grid(P_world, [1, 2, 1])
    whole = Labelled(3)[2]
    found = block_of(Labelled(3), (P_x, P_mask, None))[2]
    assert isinstance(found, Sample) and found.label == whole.label == 2
    where = own_slices((1, *SHAPE), P_x)
    if where is None:
        assert found.image.shape == found.mask.shape == (0,)
        assert (found.image.dtype, found.mask.dtype) == (torch.float32, torch.bool)
    else:
        assert torch.equal(found.image, torch.from_numpy(whole.image)[where[1:]])
        assert torch.equal(found.mask, whole.mask[where[2:]])
    named = {"image": P_x, "label": None}
    samples: Any = [{"image": whole.image, "label": np.arange(3), "name": "a"}]
    with pytest.raises(ShapeError, match=r"parts \['image', 'label'\], but .* 'name'\]; give each"):
        block_of(samples, named)[0]
    with pytest.raises(ShapeError, match=r"parts \[0, 1\], but a sample has a numpy.ndarray"):
        block_of([whole.image], (P_x, None))[0]
    del samples[0]["name"]
    again = block_of(samples, named)[0]
    assert torch.equal(again["image"], found.image) and again["label"].shape == (3,)
    stays = block_of([whole.image], None)
    assert stays[0] is whole.image


@distributed(ranks=5, transports=["loopback"])
def test_only_the_own_cells_are_read(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    where = own_slices((1, *SHAPE), P_x)
    whole = Images(3)[1]
    cells = 0 if where is None else whole[where[1:]].numel()
    lazy, regions = Counted(whole.numpy()), Regions(Images(3))
    for dataset, counter in (([lazy, lazy], lazy), (regions, regions)):
        block = block_of(dataset, P_x)[1]
        assert counter.cells == block.numel() == cells
        assert where is None or torch.equal(block, whole[where[1:]])


@distributed(ranks=2, transports=["loopback"])
def test_blocks_of_a_memory_map_have_memory_of_their_own(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 1, 2])
    whole = Images(1)[0]
    for stored in (whole, whole.numpy()):
        block = block_of([stored], P_x)[0]
        assert block.untyped_storage().nbytes() == block.nbytes < whole.nbytes
        block.zero_()
    assert whole.max() > 0


def test_memory_map_of_a_file(tmp_path: Path) -> None:
    from gpudist.testing import run_distributed

    stored = Images(1)[0].numpy()
    np.save(tmp_path / "image.npy", stored)
    run_distributed(_check_memory_map, 2, str(tmp_path / "image.npy"))


def _check_memory_map(P_world: Partition, path: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    stored = np.load(path, mmap_mode="r")
    where = own_slices((1, *SHAPE), P_x)
    assert where is not None
    (block,) = DataLoader(block_of([stored], P_x))
    assert torch.equal(block[0], torch.from_numpy(np.array(stored))[where[1:]])


@distributed(ranks=2, transports=["loopback"])
def test_what_does_not_fit_is_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1, 1, 1])
    with pytest.raises(
        PartitionError, match=r"\[2\] needs an axis for the batch .* with P_world.g"
    ):
        block_of(Images(2), grid(P_world, [2]))
    with pytest.raises(
        PartitionError, match=r"P_x is \(2, 1\) .*; create one with P_world.grid\(2"
    ):
        block_of(Images(2), (2, 1))
    with pytest.raises(PartitionError, match="one array per sample, but P_x is None"):
        block_of(Regions(Images(2)), None)
    with pytest.raises(
        ShapeError, match=r"\[7, 5\] has 2 dims, expected 3, .* P_x with 3 axes, or "
    ):
        block_of(Labelled(2), P_x)[0]
    check_batches(P_x)


def check_batches(P_x: CartesianPartition) -> None:
    with pytest.raises(ShapeError, match=r"batch has 1 samples.* use drop_last=True"):
        BlockSampler(5, P_x, 2)
    assert len(BlockSampler(5, P_x, 2, drop_last=True)) == 2
    with pytest.raises(ShapeError, match="use a larger batch_size"):
        BlockSampler(5, P_x, 1, drop_last=True)
    with pytest.raises(ShapeError, match="batch_size 0"):
        BlockSampler(5, P_x, 0)
