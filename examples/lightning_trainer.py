"""PyTorch Lightning with a U-Net whose volumes are split over the workers.

    torchrun --standalone --nproc-per-node 4 examples/lightning_trainer.py --compare

SplitStrategy and two lines of the LightningModule are what gpudist adds; loops, checkpoints,
precision, logger and progress bar are Lightning's.

This example uses Lightning rather than Hugging Face Accelerate, because the strategy is
Lightning's extension point for the work of several processes. Accelerate has none: under torchrun,
`prepare` gives every process other samples and wraps the network in DistributedDataParallel.

--save writes a checkpoint and a log after every epoch, and --resume continues from a checkpoint.

--compare also trains the sequential network on rank 0. It exits with 1 if a loss or the Dice score
differs by more than --tolerance: by default 1e-3, and 0.05 with --bf16.
"""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from comparison import verdict
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from networks import UNet3d
from torch import nn
from torch.utils.data import DataLoader

import gpudist
from gpudist import CartesianPartition

# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0


class SplitStrategy(SingleDeviceStrategy):
    """One device for each worker, which all take the same steps; rank 0 alone writes files."""

    def __init__(self, P_x: CartesianPartition) -> None:
        super().__init__(P_x.device)
        self.P_x = P_x

    @property
    def is_global_zero(self) -> bool:
        return self.P_x.rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.P_x.broadcast_data([0])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return gpudist.broadcast_batch(obj, self.P_x, root=src)


class Dice(nn.Module):
    """Dice score of the cells whose logit is positive."""

    def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        found = (logits > 0).float()
        return 2 * (found * label).sum() / (found.sum() + label.sum())


class Segmentation(lightning.LightningModule):
    """The user's module, on blocks of ``P_x`` or sequential."""

    def __init__(self, options: argparse.Namespace, P_x: CartesianPartition | None) -> None:
        super().__init__()
        torch.manual_seed(options.seed)
        parts: Any = UNet3d(1, 1, options.width), nn.BCEWithLogitsLoss(), Dice()
        if P_x is not None:
            parts = [gpudist.distribute(module, P_x) for module in parts]
        self.network, self.criterion, self.dice = parts
        self.lr = options.lr
        self.history: dict[str, list[float]] = {"loss": [], "dice": []}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, label = batch
        loss = self.criterion(self.network(x), label)
        self.history["loss"].append(loss.item())
        self.log("loss", self.history["loss"][-1], prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, label = batch
        self.history["dice"].append(self.dice(self.network(x), label).item())
        self.log("dice", self.history["dice"][-1], prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, 0.9, nesterov=True)


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
    """Train and validate, split over ``P_x`` or on one process."""
    module = Segmentation(options, P_x)
    train: Any = volumes(options.size, options.volumes, options.seed)
    test: Any = volumes(options.size, 2, options.seed + 1)
    strategy: Any = SingleDeviceStrategy("cpu")
    if P_x is not None:
        train, test = gpudist.data.block_of(train, P_x), gpudist.data.block_of(test, P_x)
        strategy = SplitStrategy(P_x)
    saves = P_x is not None and options.save
    trainer = lightning.Trainer(
        accelerator="gpu" if strategy.root_device.type == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed" if options.bf16 else "32-true",
        max_epochs=options.epochs,
        callbacks=[ModelCheckpoint(options.save, save_last=True)] if saves else [],
        logger=CSVLogger(options.save) if saves else False,
        enable_checkpointing=bool(saves),
        enable_progress_bar=strategy.is_global_zero,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    # Every worker draws the same order.
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(train, batch_size=2, shuffle=True, generator=order)
    trainer.fit(module, loader, DataLoader(test), ckpt_path=options.resume)
    return module.history


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
    add("--lr", type=float, default=0.1, help="of SGD")
    add("--seed", type=int, default=0)
    add("--bf16", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint and a log every epoch")
    add("--resume", type=Path, metavar="FILE", help="continue from a checkpoint")
    add("--compare", action="store_true", help="train the sequential network too, on rank 0")
    add("--tolerance", type=float, help="largest difference of a loss or a Dice score")
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
    ours = run(options, P_world.grid(1, 1, *options.grid))
    found: list[str] = []
    if P_world.rank == 0:
        found = verdict(ours, run(options, None) if options.compare else None, options.tolerance)
        for text in found:
            print(f"lightning_trainer.py: {text}", file=sys.stderr)
    return P_world.broadcast_data([int(bool(found))])[0]


if __name__ == "__main__":
    sys.exit(main())
