"""The Trainer of Hugging Face with an image classifier whose images are split over the workers.

    torchrun --standalone --nproc-per-node 4 examples/hugging_face_trainer.py --compare

gpudist adds the conversion of the network, the blocks of the images, and two classes: under
torchrun, the Trainer would give every process other samples and wrap the network in
DistributedDataParallel. Here each worker is a single process for it, and rank 0 writes.

The network is a ConvNeXt from a configuration, with random weights, so nothing is downloaded; with
a trained one, only from_pretrained differs. The classes are the directions of waves.

--save writes a checkpoint after every epoch, and --resume continues from one.

--compare also trains the sequential network on rank 0. It exits with 1 if a loss or an accuracy
differs by more than --tolerance: by default 1e-3, and 0.05 with --bf16.
"""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from comparison import verdict
from transformers import ConvNextConfig, ConvNextForImageClassification, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import gpudist
from gpudist import CartesianPartition

# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0
CLASSES = 4


def hide_launcher() -> None:
    """Let the Trainer see a single process; gpudist has read these variables already."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


class Arguments(TrainingArguments):
    """Arguments of one worker: it uses one device, and rank 0 alone writes and prints."""

    rank = 0
    own_device: torch.device | None = None

    @property
    def device(self) -> torch.device:
        return self.own_device or super().device

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)

    @property
    def should_save(self) -> bool:
        return self.rank == 0


class SplitTrainer(Trainer):
    """Trainer whose losses are numbers that all workers have."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: Any = super().training_step(*args, **kwargs)
        return loss.full_tensor() if isinstance(loss, gpudist.GlobalTensor) else loss


class Images(torch.utils.data.Dataset[dict[str, Any]]):
    """Noisy waves in one of several directions, or one worker's blocks of them."""

    def __init__(self, options: argparse.Namespace, P_x: CartesianPartition | None) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        self.labels = torch.arange(options.images) % CLASSES
        along = torch.arange(options.size) / 4
        angle = (self.labels * math.pi / CLASSES)[:, None, None]
        waves = (along * angle.cos() + along[:, None] * angle.sin()).sin()[:, None]
        noise = torch.randn(options.images, 3, options.size, options.size, generator=generator)
        self.pixels: Any = list(waves + noise)
        if P_x is not None:
            self.pixels = gpudist.data.block_of(self.pixels, P_x)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


def run(options: argparse.Namespace, P_x: CartesianPartition | None) -> dict[str, list[float]]:
    """Train, split over ``P_x`` or on one process."""
    torch.manual_seed(options.seed)
    config = ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=CLASSES, patch_size=4
    )
    network: Any = ConvNextForImageClassification(config)
    if P_x is not None:
        network = gpudist.distribute(network, P_x)
    with TemporaryDirectory() as folder:
        saves = bool(options.save) and P_x is not None
        arguments = Arguments(
            output_dir=str(options.save) if saves else folder,
            save_strategy="epoch" if saves else "no",
            num_train_epochs=options.epochs,
            learning_rate=options.lr,
            per_device_train_batch_size=4,
            logging_steps=1,
            seed=options.seed,
            bf16=options.bf16,
            use_cpu=P_x is None or P_x.device.type == "cpu",
            dataloader_pin_memory=False,
            disable_tqdm=True,
            report_to="none",
        )
        if P_x is not None:
            arguments.rank, arguments.own_device = P_x.rank or 0, P_x.device
        trainer = SplitTrainer(network, arguments, train_dataset=Images(options, P_x))
        if arguments.rank > 0:
            trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=options.resume and str(options.resume))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"loss": [e["loss"] for e in history], "gradient": [e["grad_norm"] for e in history]}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, default=64, help="pixels per side, a multiple of 32")
    add("--images", type=int, default=16, help="images to train on")
    add("--grid", type=int, nargs=2, default=[2, 2], help="grid of workers over the image")
    add("--epochs", type=int, default=4)
    add("--lr", type=float, default=1e-3, help="of AdamW, at the start")
    add("--seed", type=int, default=0)
    add("--bf16", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint every epoch")
    add("--resume", type=Path, metavar="FOLDER", help="continue from a checkpoint")
    add("--compare", action="store_true", help="train the sequential network too, on rank 0")
    add("--tolerance", type=float, help="largest difference of a loss or a gradient's norm")
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
            print(f"hugging_face_trainer.py: {text}", file=sys.stderr)
    return P_world.broadcast_data([int(bool(found))])[0]


if __name__ == "__main__":
    sys.exit(main())
