"""Inference of a MONAI bundle on a whole volume that is split over the workers.

    torchrun --standalone --nproc-per-node 4 examples/monai_bundle.py --compare

SPLIT is what gpudist adds: a second configuration file, which MONAI merges into the bundle's own.
With a bundle of your own, write SPLIT as configs/split.json and start

    torchrun ... -m monai.bundle run \\
        --config_file "['configs/inference.json', 'configs/split.json']"

The bundle's sliding windows are replaced by one call on the whole volume, in blocks: no window has
an edge inside the volume, and no worker holds more activations than those of its block. The bundle
here is written by the program, with random weights.

--compare also passes the whole volume to the sequential network on rank 0. It exits with 1 if a
probability differs by more than --tolerance, by default 1e-4.
"""

# The packages may be missing.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from comparison import verdict
from monai.bundle import ConfigWorkflow
from monai.data import create_test_image_3d
from monai.networks.nets import UNet

import gpudist

# Time that the other workers wait for rank 0, which runs the sequential network alone.
TIMEOUT_S = 3600.0

NETWORK = {
    "spatial_dims": 3, "in_channels": 1, "out_channels": 3, "channels": [8, 16, 32],
    "strides": [2, 2], "num_res_units": 1,
}  # fmt: skip
# Bundles of MONAI's model zoo have these names.
INFERENCE = {
    "imports": ["$import torch"],
    "bundle_root": ".",
    "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
    "network_def": {"_target_": "UNet", **NETWORK},
    "network": "$@network_def.to(@device)",
    "preprocessing": {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "LoadImaged", "keys": "image", "ensure_channel_first": True},
            {"_target_": "ScaleIntensityd", "keys": "image"},
        ],
    },
    "dataset": {
        "_target_": "Dataset",
        "data": [{"image": "$@bundle_root + '/image.nii'"}],
        "transform": "@preprocessing",
    },
    "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
    "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [16, 16, 16], "overlap": 0.5},
    "postprocessing": {"_target_": "Activationsd", "keys": "pred", "softmax": True},
    "handlers": [
        {
            "_target_": "CheckpointLoader",
            "load_path": "$@bundle_root + '/models/model.pt'",
            "load_dict": {"model": "@network"},
        }
    ],
    "evaluator": {
        "_target_": "SupervisedEvaluator",
        "device": "@device",
        "val_data_loader": "@dataloader",
        "network": "@network",
        "inferer": "@inferer",
        "postprocessing": "@postprocessing",
        "val_handlers": "@handlers",
    },
    "run": ["$@evaluator.run()"],
}
SPLIT = {
    "imports": ["$import torch", "$import gpudist"],
    "grid": [2, 2, 1],
    "P_x": "$gpudist.init().grid(1, 1, *@grid)",
    "device": "$@P_x.device",
    "network": "$gpudist.distribute(@network_def.to(@device), @P_x)",
    "plain": {"_target_": "EnsureTyped", "keys": "image", "track_meta": False},
    "whole": {"_target_": "Dataset", "data": "@dataset", "transform": "@plain"},
    "dataloader#dataset": "$gpudist.data.block_of(@whole, {'image': @P_x})",
    "inferer": "$lambda inputs, network, *args, **kwargs: network(inputs).to_local()",
}


def write_bundle(folder: Path, size: int) -> None:
    """Write a bundle with random weights, and a volume of balls."""
    for name in ("configs", "models"):
        (folder / name).mkdir()
    for name, config in (("inference", INFERENCE), ("split", SPLIT), ("metadata", {})):
        (folder / "configs" / f"{name}.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(0)
    torch.save({"model": UNet(**NETWORK).state_dict()}, folder / "models" / "model.pt")
    image, _ = create_test_image_3d(
        size, size, size, rad_max=size // 5, rad_min=2, random_state=np.random.RandomState(0)
    )
    nibabel.save(nibabel.Nifti1Image(image.astype(np.float32), np.eye(4)), folder / "image.nii")


def infer(folder: Path, names: tuple[str, ...], **changes: Any) -> torch.Tensor:
    """Run the bundle with these configuration files, and return the probabilities."""
    files = [str(folder / "configs" / f"{name}.json") for name in names]
    workflow = ConfigWorkflow(
        files, logging_file=False, workflow_type="infer", bundle_root=str(folder), **changes
    )
    workflow.initialize()
    workflow.run()
    pred = workflow.evaluator.state.output[0]["pred"]
    # MONAI's transforms return a MetaTensor.
    return pred.as_tensor() if hasattr(pred, "as_tensor") else pred


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=32, help="cells per side, a multiple of 4")
    parser.add_argument("--grid", type=int, nargs=3, default=[2, 2, 1], help="over the volume")
    parser.add_argument("--compare", action="store_true", help="compare with one process")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    P_world = gpudist.init(TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="bundle-") as own:
        folder = Path(bytes(P_world.broadcast_data(list(own.encode()))).decode())
        if P_world.rank == 0:
            write_bundle(folder, options.size)
        P_world.barrier()
        block = infer(folder, ("inference", "split"), grid=options.grid)
        whole = gpudist.gather(block[None], P_world.grid(1, 1, *options.grid))
        found: list[str] = []
        if P_world.rank == 0:
            ours, theirs = {"probabilities": whole.flatten().tolist()}, None
            if options.compare:
                alone = infer(folder, ("inference",), inferer={"_target_": "SimpleInferer"})
                theirs = {"probabilities": alone.flatten().tolist()}
            found = verdict(ours, theirs, options.tolerance)
            for text in found:
                print(f"monai_bundle.py: {text}", file=sys.stderr)
        return P_world.broadcast_data([int(bool(found))])[0]


if __name__ == "__main__":
    sys.exit(main())
