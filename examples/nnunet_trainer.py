"""nnU-Net's trainer with patches that are split over the workers.

    torchrun --standalone --nproc-per-node 4 examples/nnunet_trainer.py --compare

SplitTrainer is what gpudist adds to nnUNetTrainer: network and loss are converted, rank 0 alone
loads and augments patches and scatters them, and the counts of the online validation are summed.
The loop, optimizer, schedule, logger and checkpoints are nnU-Net's. A checkpoint has the names and
shapes of the sequential network, so nnU-Net predicts with it as usual.

The program writes a small data set of balls in nnU-Net's format into --folder; nnU-Net's planner
chooses network and patch, and its preprocessor prepares the data. --resume continues the training
of an earlier run from its last checkpoint in that folder. --predict then predicts all images by
sliding windows, each of which is split over the workers too.

--compare also trains the sequential network on rank 0, on the same patches. It exits with 1 if a
loss or a Dice score of an epoch differs by more than --tolerance: by default 1e-3, and 0.05 with
--bf16.
"""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
import torch.nn.functional as F
from comparison import progress, verdict
from monai.data import create_test_image_3d
from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import (
    ExperimentPlanner,
)
from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import nn
from torch.utils._pytree import tree_map

import gpudist
from gpudist import CartesianPartition, checkpoint

DATASET, CONFIGURATION = "Dataset999_Balls", "3d_fullres"
# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0


class ShortTrainer(nnUNetTrainer):
    """The user's trainer: few epochs, and the same patches in every run."""

    bf16 = False
    report: Callable[[float], None] = print
    steps = 0

    def plot_network_architecture(self) -> None:
        """Draw nothing, because rank 0 alone would call the network, on random numbers."""

    def train_step(self, batch: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            found = super().train_step(batch)
        self.report(float(found["loss"]))
        self.steps += 1
        seed_all(self.steps)
        return found


class SplitTrainer(ShortTrainer):
    """A trainer whose patches are split over the workers of ``P_x``."""

    P_x: CartesianPartition
    # Only rank 0 writes logs and checkpoints.
    local_rank: Any = property(lambda self: self.P_x.rank, lambda self, rank: None)

    def print_to_log_file(self, *args: Any, **kwargs: Any) -> None:
        if self.local_rank == 0:
            super().print_to_log_file(*args, **kwargs)

    def initialize(self) -> None:
        self.device = self.P_x.device
        super().initialize()
        weights = self.network.state_dict()
        self.network = gpudist.distribute(self.network, self.P_x)
        checkpoint.load_full_state_dict(self.network, weights if self.local_rank == 0 else None)
        self.optimizer, self.lr_scheduler = self.configure_optimizers()

    def _do_i_compile(self) -> bool:
        return False

    def _build_loss(self) -> nn.Module:
        loss: Any = super()._build_loss()
        (loss.loss if self.enable_deep_supervision else loss).dc.register_forward_pre_hook(one_hot)
        # Outputs of deep supervision have other shapes at each level.
        kinds = {name: "dynamic" for name in ("args[0]", "args[1]", "net_output", "target")}
        return gpudist.distribute(loss, self.P_x, inputs=kinds)

    def get_dataloaders(self) -> Any:
        nothing = itertools.repeat({"data": None, "target": [None] * 99})
        return super().get_dataloaders() if self.local_rank == 0 else (nothing, nothing)

    def blocks(self, batch: Any) -> Any:
        """Return this worker's block of the batch of rank 0."""
        levels = self._get_deep_supervision_scales()
        target = batch["target"][: len(levels)] if levels else batch["target"]
        return tree_map(
            lambda x: gpudist.scatter(x, self.P_x), {"data": batch["data"], "target": target},
            is_leaf=lambda x: x is None,
        )  # fmt: skip

    def train_step(self, batch: Any) -> Any:
        return super().train_step(self.blocks(batch))

    def validation_step(self, batch: Any) -> Any:
        """Count on this worker's block, and sum the counts."""
        network = self.network
        self.network = lambda x: tree_map(lambda y: y.to_local(), network(x))
        try:
            found = super().validation_step(self.blocks(batch))
        finally:
            self.network = network
        for name in ("tp_hard", "fp_hard", "fn_hard"):
            found[name] = np.array(self.P_x.allreduce_data(found[name].tolist()))
        return found

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        """Compute every sliding window in blocks; rank 0 alone cuts, joins and writes them."""
        network = self.network
        self.network = windows = Windows(network, self.P_x)
        try:
            if self.local_rank == 0:
                super().perform_actual_validation(save_probabilities)
            else:
                self.set_deep_supervision_enabled(False)
                windows.eval().serve()
                self.set_deep_supervision_enabled(True)
        finally:
            windows.end()
            self.network = network


class Windows(nn.Module):
    """Network whose windows and outputs are whole on rank 0, and blocks on the other workers."""

    def __init__(self, network: Any, P_x: CartesianPartition) -> None:
        super().__init__()
        self.network, self.decoder, self.P_x = network, network.decoder, P_x

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        if x is not None:
            self.P_x.broadcast_data([1])
        return gpudist.gather(self.network(gpudist.scatter(x, self.P_x)).to_local(), self.P_x)

    def serve(self) -> None:
        """Compute this worker's blocks until rank 0 ends."""
        with torch.inference_mode(), torch.autocast("cuda", enabled=self.P_x.device.type == "cuda"):
            while self.P_x.broadcast_data(None)[0]:
                self(None)

    def end(self) -> None:
        if self.P_x.rank == 0:
            self.P_x.broadcast_data([0])


def one_hot(dice: nn.Module, args: Any) -> Any:
    """Pass classes in one channel each, which Dice would otherwise allocate for the whole patch."""
    output, target = args
    return output, F.one_hot(target[:, 0].long(), output.shape[1]).movedim(-1, 1)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def write_dataset(folder: Path, size: int) -> None:
    """Write raw images of balls, let nnU-Net plan, and preprocess them in this process."""
    raw, ready = folder / "raw" / DATASET, folder / "preprocessed" / DATASET
    for one in (raw / "imagesTr", raw / "labelsTr", ready / f"nnUNetPlans_{CONFIGURATION}"):
        one.mkdir(parents=True)
    names = [f"ball_{i:03d}" for i in range(6)]
    for i, name in enumerate(names):
        image, label = create_test_image_3d(
            size, size, size, num_objs=6, rad_max=size // 5, rad_min=size // 10,
            num_seg_classes=2, random_state=np.random.RandomState(i),
        )  # fmt: skip
        # nnU-Net crops to cells that are not 0.
        for part, cells in (("imagesTr", image + 0.1), ("labelsTr", label)):
            file = raw / part / f"{name}{'_0000' * (part == 'imagesTr')}.nii.gz"
            nibabel.save(nibabel.Nifti1Image(cells.astype(np.float32), np.eye(4)), file)
    dataset = {
        "channel_names": {"0": "noise"}, "labels": {"background": 0, "small": 1, "large": 2},
        "numTraining": len(names), "file_ending": ".nii.gz",
    }  # fmt: skip
    intensity = {"max": 1.1, "mean": 0.6, "median": 0.6, "min": 0.1, "std": 0.3}
    fingerprint = {
        "spacings": [[1.0] * 3] * len(names), "shapes_after_crop": [[size] * 3] * len(names),
        "foreground_intensity_properties_per_channel": {
            "0": {**intensity, "percentile_00_5": 0.1, "percentile_99_5": 1.1}
        },
        "median_relative_size_after_cropping": 1.0,
    }  # fmt: skip
    for one in (raw, ready):
        (one / "dataset.json").write_text(json.dumps(dataset))
    (ready / "dataset_fingerprint.json").write_text(json.dumps(fingerprint))
    os.environ.update(nnUNet_n_proc_DA="1")
    plans: Any = ExperimentPlanner(DATASET).plan_experiment()
    # As planned, but narrow.
    network = plans["configurations"][CONFIGURATION]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [n // 4 for n in network["features_per_stage"]]
    (ready / "nnUNetPlans.json").write_text(json.dumps(plans))
    manager = PlansManager(plans)
    configuration = manager.get_configuration(CONFIGURATION)
    for name in names:
        DefaultPreprocessor(verbose=False).run_case_save(
            str(ready / f"nnUNetPlans_{CONFIGURATION}" / name),
            [str(raw / "imagesTr" / f"{name}_0000.nii.gz")],
            str(raw / "labelsTr" / f"{name}.nii.gz"),
            manager,
            configuration,
            dataset,
        )
    shutil.copytree(raw / "labelsTr", ready / "gt_segmentations")


def run(options: argparse.Namespace, kind: type[ShortTrainer], is_first: bool) -> Any:
    """Train by nnU-Net's loop, and return the losses and Dice scores by epoch."""
    ready = options.folder / "preprocessed" / DATASET
    plans = json.loads((ready / "nnUNetPlans.json").read_text())
    dataset = json.loads((ready / "dataset.json").read_text())
    # Patches are loaded in this process.
    os.environ.update(nnUNet_n_proc_DA="0")
    seed_all(0)
    plans["continue_training"] = bool(options.resume)
    trainer = kind(plans, CONFIGURATION, "all", dataset, SplitTrainer.P_x.device)
    trainer.num_epochs, trainer.bf16 = options.epochs, options.bf16
    trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = options.steps, 2
    trainer.initialize()
    if options.resume:
        trainer.load_checkpoint(f"{trainer.output_folder}/checkpoint_final.pth")
    name = "sequential" if kind is ShortTrainer else "split"
    count = options.steps * (options.epochs - trainer.current_epoch)
    with progress(name, count, is_first) as trainer.report:
        trainer.run_training()
    names = {"loss": "train_losses", "validation loss": "val_losses", "dice": "mean_fg_dice"}
    found = {name: list(trainer.logger.get_value(key, None)) for name, key in names.items()}
    if options.predict:
        trainer.perform_actual_validation()
        if is_first:
            scores = json.loads(Path(trainer.output_folder, "validation/summary.json").read_text())
            found["dice of windows"] = [scores["foreground_mean"]["Dice"]]
    return found


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, default=32, help="cells per side of an image")
    add("--grid", type=int, nargs=3, default=[2, 2, 1], help="grid of workers over a patch")
    add("--epochs", type=int, default=3)
    add("--steps", type=int, default=4, help="steps per epoch")
    add("--bf16", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--folder", type=Path, help="folder of nnU-Net's data; by default a temporary one")
    add("--resume", action="store_true", help="continue the training in --folder")
    add("--predict", action="store_true", help="then predict all images by sliding windows")
    add("--compare", action="store_true", help="train the sequential network too, on rank 0")
    add("--tolerance", type=float, help="largest difference of a loss or a Dice score")
    options = parser.parse_args()
    if options.resume and (options.compare or not options.folder):
        parser.error("--resume needs --folder, and no --compare, which starts anew")
    if options.tolerance is None:
        options.tolerance = 0.05 if options.bf16 else 1e-3
    return options


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    P_world = gpudist.init(TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="nnunet-") as temporary:
        own = str(options.folder or temporary).encode()
        options.folder = Path(bytes(P_world.broadcast_data(list(own))).decode())
        for part in ("raw", "preprocessed", "results"):
            os.environ[f"nnUNet_{part}"] = str(options.folder / part)
        is_new = not (options.folder / "preprocessed").exists()
        P_world.broadcast_data([0])
        if P_world.rank == 0 and is_new:
            write_dataset(options.folder, options.size)
        P_world.broadcast_data([0])
        SplitTrainer.P_x = P_world.grid(1, 1, *options.grid)
        ours = run(options, SplitTrainer, P_world.rank == 0)
        found: list[str] = []
        if P_world.rank == 0:
            theirs = run(options, ShortTrainer, True) if options.compare else None
            found = verdict(ours, theirs, options.tolerance)
            for text in found:
                print(f"nnunet_trainer.py: {text}", file=sys.stderr)
        return P_world.broadcast_data([int(bool(found))])[0]


if __name__ == "__main__":
    sys.exit(main())
