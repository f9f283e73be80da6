"""Segment volumes that are read by blocks: random crops, augmentation, whole-volume validation.

    torchrun --standalone --nproc-per-node 2 examples/segmentation.py --compare

The MNI152 template that comes with nilearn is written once as files that can be read in blocks, an
image and a label of each hemisphere; --image and --label choose their formats. A U-Net is trained
on random crops of the left hemisphere, mirrored and with random brightness, and after every epoch
Dice scores are computed on the whole right one. No worker reads more than its blocks.

--save writes a checkpoint after every epoch, and --resume continues from one to the same numbers,
also on another grid: crops depend on the seed, the epoch and their index alone.

--compare also trains the sequential network on rank 0, on the same crops. It exits with 1 if a
loss, a Dice score or a parameter differs by more than --tolerance: by default 1e-9 in float64 and
1e-3 in float32.
"""

# The packages may be missing.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparison import progress, verdict
from networks import UNet3d
from torch import nn
from torch.utils.data import DataLoader, Dataset, StackDataset
from volumes import DataError, brain

import gpudist
from gpudist import Partition, checkpoint
from gpudist.data import BlockSampler, RandomCrops, block_of
from gpudist.nn import DistributedCrossEntropyLoss

LEVELS, BATCH, CROPS = 3, 2, 16
FORMATS = ("nii", "zarr", "h5", "npy")
# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0


class Files(Dataset[Any]):
    """Arrays in files, which nothing reads until a block is cut."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index]
        match path.suffix:
            case ".nii":
                import nibabel

                return nibabel.load(path).dataobj  # pyright: ignore
            case ".zarr":
                import zarr

                return zarr.open_array(path, mode="r")
            case ".h5":
                import h5py

                return h5py.File(path)["cells"]
        return np.load(path, mmap_mode="r")


def write(path: Path, array: np.ndarray[Any, Any]) -> None:
    match path.suffix:
        case ".nii":
            import nibabel

            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)  # pyright: ignore
        case ".zarr":
            import zarr

            zarr.create_array(path, data=array, chunks=(16, 16, 16))
        case ".h5":
            import h5py

            with h5py.File(path, "w") as file:
                file.create_dataset("cells", data=array, chunks=True)
        case _:
            np.save(path, array)


def write_brain(files: dict[str, StackDataset[Any]], every: int) -> None:
    """Write every ``every``-th cell of both hemispheres, with sides that the network can halve."""
    volume = brain()
    for part, pair in files.items():
        box = tuple(slice(*region, every) for region in volume.regions[part])
        image, *shares = (np.asarray(x[box], np.int16) for x in (volume.image, *volume.shares))
        classes = np.argmax(np.stack([255 - np.sum(shares, axis=0), *shares]), axis=0)
        cut = tuple(slice(n - n % (1 << (LEVELS - 1))) for n in image.shape)
        for array, file in zip((image, classes), pair.datasets, strict=True):
            write(file.paths[0], array[cut].astype(np.uint8))


def brighten(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return image * torch.empty(()).uniform_(0.95, 1.05, generator=generator)


def train(
    options: argparse.Namespace, files: Any, P: Partition, state: Any = None
) -> tuple[dict[str, list[float]], Any]:
    """Train and validate, split over ``P``, or on one process from the state of the split network.

    Returns:
        Losses, Dice scores and parameters, and the state before the first epoch; on rank 0.
    """
    is_split, is_first = state is None, P.rank == 0
    grid = (options.grid or (P.size, 1, 1)) if is_split else (1, 1, 1)
    P_x, P_t = P.grid(1, 1, *grid), P.grid(1, *grid)
    torch.manual_seed(options.seed)
    network: Any = UNet3d(1, 3, options.width, LEVELS).to(P.device, getattr(torch, options.dtype))
    network.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
    criterion: nn.Module = nn.CrossEntropyLoss()
    if is_split:
        network, criterion = gpudist.distribute(network, P_x), DistributedCrossEntropyLoss(P_x)
    optimizer = torch.optim.Adam(network.parameters(), options.lr)
    if not is_split:
        network.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    elif options.resume:
        checkpoint.load(network, options.resume, optimizer)
    if is_split:
        state = [checkpoint.full_state_dict(network)]
        state.append(checkpoint.full_optimizer_state_dict(network, optimizer))

    def prepared(image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return image[:, None].to(P.device, network.head.weight.dtype) / 128, label.to(P.device)

    crops = RandomCrops(
        files["train"], (options.size,) * 3, crops_per_sample=CROPS, flips=(0, 1, 2),
        transform=(brighten, None), seed=options.seed,
    )  # fmt: skip
    sampler = BlockSampler(len(crops), P_t, BATCH, shuffle=True, seed=options.seed)
    loader = DataLoader(block_of(crops, P_t), batch_sampler=sampler)
    history: dict[str, list[float]] = {"loss": [], "grey matter": [], "white matter": []}
    epochs = range(int(network.epoch), options.epochs)
    if not epochs:
        sys.exit(f"segmentation.py: {epochs.start} epochs are done; take more --epochs")
    name = "split" if is_split else "sequential"
    with progress(name, len(epochs) * len(loader), is_first) as report:
        for epoch in epochs:
            crops.set_epoch(epoch)
            sampler.set_epoch(epoch)
            for batch in loader:
                x, target = prepared(*batch)
                loss = criterion(network(x), target.long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history["loss"].append(loss.item())
                report(history["loss"][-1])
            network.epoch += 1
            if is_split and options.save:
                checkpoint.save(network, options.save, optimizer)
            # The whole volume at once, in blocks.
            ((x, target),) = (prepared(*pair) for pair in DataLoader(block_of(files["test"], P_t)))
            with torch.no_grad():
                y = network(x)
            found = (y.to_local() if is_split else y).argmax(1)
            for at, tissue in enumerate(("grey matter", "white matter"), start=1):
                one, other = found == at, target == at
                counts = (one & other).sum().item(), one.sum().item(), other.sum().item()
                both, *sizes = P.allreduce_data(list(counts))
                history[tissue].append(2 * both / sum(sizes))
    whole = checkpoint.full_state_dict(network) if is_split else network.state_dict()
    if is_first:
        history["parameters"] = torch.cat([p.flatten().cpu() for p in whole.values()]).tolist()
    return history, state


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--image", choices=FORMATS, default="nii", help="format of the images")
    add("--label", choices=FORMATS, default="npy", help="format of the labels")
    add("--every", type=int, default=4, help="take every n-th cell of the template")
    add("--size", type=int, default=16, help="cells per side of a crop, a multiple of 4")
    add("--width", type=int, default=8, help="channels of the first level, a multiple of 4")
    add("--grid", type=int, nargs=3, help="grid of workers over a volume")
    add("--epochs", type=int, default=5)
    add("--lr", type=float, default=0.02, help="of Adam")
    add("--seed", type=int, default=0, help="seed of the initial values and the crops")
    add("--dtype", choices=["float32", "float64"], default="float32")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint after every epoch")
    add("--resume", type=Path, metavar="FOLDER", help="continue from a checkpoint")
    add("--compare", action="store_true", help="train the sequential network too, on rank 0")
    add("--tolerance", type=float, help="largest difference of a number")
    options = parser.parse_args()
    if options.tolerance is None:
        options.tolerance = {"float32": 1e-3, "float64": 1e-9}[options.dtype]
    return options


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    P_world = gpudist.init(TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="segmentation-") as own:
        folder = Path(bytes(P_world.broadcast_data(list(own.encode()))).decode())
        files: Any = {
            part: StackDataset(
                Files(folder / f"{part}_image.{options.image}"),
                Files(folder / f"{part}_label.{options.label}"),
            )
            for part in ("train", "test")
        }
        if P_world.rank == 0:
            write_brain(files, options.every)
        P_world.barrier()
        ours, state = train(options, files, P_world)
        found: list[str] = []
        if P_world.rank == 0:
            P_one = P_world.create_partition_inclusive([0])
            theirs = train(options, files, P_one, state)[0] if options.compare else None
            found = verdict(ours, theirs, options.tolerance)
            for text in found:
                print(f"segmentation.py: {text}", file=sys.stderr)
        return P_world.broadcast_data([int(bool(found))])[0]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DataError as error:
        sys.exit(f"segmentation.py: {error}")
