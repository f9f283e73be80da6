"""MONAI's SupervisedTrainer with a U-Net of MONAI whose volumes are split over the workers.

    torchrun --standalone --nproc-per-node 4 examples/monai_trainer.py --compare

Network, loss and metric are converted, and loaders read this worker's blocks; everything else is
MONAI's and ignite's: trainer, evaluator, handlers, inferer. There are no sliding windows: the
evaluator passes each whole volume to the network at once, in blocks, and Dice is computed on them.

Labels have one channel per class. DiceCELoss(to_onehot_y=True) also works, but MONAI then allocates
whole labels on every worker, as a warning says.

The volumes are of monai.data.create_test_image_3d. --save writes a checkpoint after every epoch,
by MONAI's CheckpointSaver, and --resume starts from one.

--compare also trains the sequential network on rank 0. It exits with 1 if a loss or the Dice score
differs by more than --tolerance: by default 1e-3, and 0.05 with --bf16.
"""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comparison import verdict
from ignite.engine import Events
from ignite.handlers import ProgressBar
from ignite.metrics import Average
from monai.data import DataLoader, create_test_image_3d
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import CheckpointLoader, CheckpointSaver, StatsHandler, ValidationHandler
from monai.inferers import SimpleInferer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.networks.utils import one_hot
from torch import nn

import gpudist
from gpudist import CartesianPartition

CLASSES = 3
# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0


def volumes(size: int, count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return images ``[1, x, y, z]`` of balls with noise, and labels in one channel per class."""
    found: list[dict[str, torch.Tensor]] = []
    for i in range(count):
        image, label = create_test_image_3d(
            size, size, size, num_objs=6, rad_max=size // 5, rad_min=size // 10,
            num_seg_classes=CLASSES - 1, random_state=np.random.RandomState(seed + i),
        )  # fmt: skip
        labels = one_hot(torch.from_numpy(label).long()[None], CLASSES, dim=0)
        found.append({"image": torch.from_numpy(image).float()[None], "label": labels})
    return found


class Dice(nn.Module):
    """Mean Dice score of all classes but the background."""

    def forward(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        found = F.one_hot(pred.argmax(1), CLASSES).movedim(-1, 1)
        cells = (0, 2, 3, 4)
        scores = 2 * (found * label).sum(cells) / (found.sum(cells) + label.sum(cells))
        return scores[1:].mean()


class Autocast(SimpleInferer):
    """Whole-volume inference in bfloat16; ``amp`` of MONAI's trainer is for CUDA only."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        super().__init__()
        self.options = device.type, torch.bfloat16, enabled

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast(*self.options):
            return super().__call__(*args, **kwargs).float()


def run(options: argparse.Namespace, P_x: CartesianPartition | None) -> dict[str, list[float]]:
    """Train and validate, split over ``P_x`` or on one process."""
    torch.manual_seed(options.seed)
    network: Any = UNet(3, 1, CLASSES, (8, 16, 32), (2, 2), num_res_units=1)
    criterion: Any = DiceCELoss(softmax=True)
    dice: Any = Dice()
    train: Any = volumes(options.size, options.volumes, options.seed)
    test: Any = volumes(options.size, 2, options.seed + 1000)
    device, is_first = torch.device("cpu"), True
    if P_x is not None:
        network, criterion, dice = (gpudist.distribute(m, P_x) for m in (network, criterion, dice))
        parts = {"image": P_x, "label": P_x}
        train, test = gpudist.data.block_of(train, parts), gpudist.data.block_of(test, parts)
        device, is_first = P_x.device, P_x.rank == 0

    optimizer = torch.optim.SGD(network.parameters(), options.lr, 0.9, nesterov=True)
    inferer = Autocast(device, options.bf16)
    # One volume a batch, which MONAI decollates.
    scores = Average(lambda items: dice(items[0]["pred"][None], items[0]["label"][None]).item())
    evaluator = SupervisedEvaluator(
        device, DataLoader(test, batch_size=1), network, inferer=inferer,
        key_val_metric={"dice": scores},
    )  # fmt: skip
    # Every worker draws the same order.
    order = torch.Generator().manual_seed(options.seed)
    trainer = SupervisedTrainer(
        device, options.epochs, DataLoader(train, batch_size=2, shuffle=True, generator=order),
        network, optimizer, criterion, inferer=inferer, decollate=False,
        train_handlers=[ValidationHandler(1, evaluator)],
    )  # fmt: skip
    history: dict[str, list[float]] = {"loss": [], "dice": []}

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep_loss() -> None:
        trainer.state.output["loss"] = trainer.state.output["loss"].item()
        history["loss"].append(trainer.state.output["loss"])

    @evaluator.on(Events.COMPLETED)
    def keep_dice() -> None:
        history["dice"].append(evaluator.state.metrics["dice"])

    kept = {"network": network, "optimizer": optimizer, "trainer": trainer}
    if options.resume:
        CheckpointLoader(str(options.resume), kept, strict_shape=True).attach(trainer)
    if is_first:
        name = "sequential" if P_x is None else "split"
        ProgressBar(desc=name).attach(trainer, output_transform=lambda output: output["loss"])
        StatsHandler(name=name, output_transform=lambda _: None).attach(evaluator)
        logging.getLogger(name).setLevel(logging.INFO)
        if options.save and P_x is not None:
            CheckpointSaver(str(options.save), kept, save_interval=1, n_saved=1).attach(trainer)
    trainer.run()
    return history


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, default=32, help="cells per side of a volume, a multiple of 4")
    add("--volumes", type=int, default=8, help="volumes to train on")
    add("--grid", type=int, nargs=3, default=[2, 2, 1], help="grid of workers over the volume")
    add("--epochs", type=int, default=3)
    add("--lr", type=float, default=0.05, help="of SGD")
    add("--seed", type=int, default=0)
    add("--bf16", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint after every epoch")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")
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
            print(f"monai_trainer.py: {text}", file=sys.stderr)
    return P_world.broadcast_data([int(bool(found))])[0]


if __name__ == "__main__":
    sys.exit(main())
