"""A training loop of Hugging Face Accelerate with a U-Net whose volumes are split over the workers.

    torchrun --standalone --nproc-per-node 4 examples/accelerate_trainer.py --compare

gpudist adds the conversion of network and loss, the blocks of the data, and `hide_launcher`: under
torchrun, Accelerate would give every process other samples and wrap the network in
DistributedDataParallel. Here each worker is a single process for it, and rank 0 writes.

--save writes a checkpoint after every epoch, and --resume continues from one.

--compare also trains the sequential network on rank 0. It exits with 1 if a loss differs by more
than --tolerance: by default 1e-3, and 0.05 with --bf16.
"""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from comparison import verdict
from networks import UNet3d
from torch import nn
from torch.utils.data import DataLoader

import gpudist
from gpudist import CartesianPartition

# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0


def hide_launcher() -> None:
    """Let Accelerate see a single process; gpudist has read these variables already."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def volumes(size: int, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return noisy balls and their cells, ``[1, x, y, z]`` each."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.stack(torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij")) / size
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(count):
        centers = torch.rand(4, 3, 1, 1, 1, generator=generator)
        label = ((cells - centers).norm(dim=1) < 0.3).any(0)[None].float()
        found.append((label + torch.randn(label.shape, generator=generator), label))
    return found


def run(options: argparse.Namespace, P_x: CartesianPartition | None) -> dict[str, list[float]]:
    """Train, split over ``P_x`` or on one process."""
    torch.manual_seed(options.seed)
    network: Any = UNet3d(1, 1, options.width)
    criterion: Any = nn.BCEWithLogitsLoss()
    data: Any = volumes(options.size, options.volumes, options.seed)
    if P_x is not None:
        network, criterion = (gpudist.distribute(m, P_x) for m in (network, criterion))
        data = gpudist.data.block_of(data, P_x)
    accelerator = Accelerator(
        mixed_precision="bf16" if options.bf16 else "no",
        cpu=P_x is None or P_x.device.type == "cpu",
    )
    optimizer = torch.optim.SGD(network.parameters(), options.lr, 0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    # Every worker draws the same order.
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=order)
    network, optimizer, loader, scheduler = accelerator.prepare(
        network, optimizer, loader, scheduler
    )
    if options.resume:
        accelerator.load_state(options.resume)
    losses: list[float] = []
    for _ in range(scheduler.scheduler.last_epoch, options.epochs):
        for x, label in loader:
            with accelerator.autocast():
                loss = criterion(network(x), label)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        scheduler.step()
        if options.save and P_x is not None and P_x.rank == 0:
            accelerator.save_state(options.save)
    return {"loss": losses}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, default=32, help="cells per side of a volume, a multiple of 8")
    add("--width", type=int, default=8, help="channels of the first level, a multiple of 4")
    add("--volumes", type=int, default=8, help="volumes to train on")
    add("--grid", type=int, nargs=3, default=[2, 2, 1], help="grid of workers over the volume")
    add("--epochs", type=int, default=4)
    add("--lr", type=float, default=0.1, help="of SGD, in the first epoch")
    add("--seed", type=int, default=0)
    add("--bf16", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint every epoch")
    add("--resume", type=Path, metavar="FOLDER", help="continue from a checkpoint")
    add("--compare", action="store_true", help="train the sequential network too, on rank 0")
    add("--tolerance", type=float, help="largest difference of a loss")
    options = parser.parse_args()
    if options.resume and options.compare:
        parser.error("--compare starts from the initial values; leave out --resume")
    if options.tolerance is None:
        options.tolerance = 0.05 if options.bf16 else 1e-3
    return options


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    P_world = gpudist.init(TIMEOUT_S)
    hide_launcher()
    ours = run(options, P_world.grid(1, 1, *options.grid))
    found: list[str] = []
    if P_world.rank == 0:
        found = verdict(ours, run(options, None) if options.compare else None, options.tolerance)
        for text in found:
            print(f"accelerate_trainer.py: {text}", file=sys.stderr)
    return P_world.broadcast_data([int(bool(found))])[0]


if __name__ == "__main__":
    sys.exit(main())
