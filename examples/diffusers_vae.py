"""A pipeline of diffusers whose image decoder is split over the workers, by one assignment.

    torchrun --standalone --nproc-per-node 4 examples/diffusers_vae.py --compare

At high resolution, the autoencoder needs the most memory of a pipeline. Here every worker runs the
pipeline with the same seed, so that all have the same latents, and each decodes its block of the
image. The decoded image is a global tensor: the pipeline's postprocessing works on blocks, and
full_tensor() gathers the finished image.

First the split autoencoder is fine-tuned for --steps on synthetic images. --save writes a
checkpoint, and --resume starts from one. The weights are small and random, so that nothing is
downloaded; with a trained pipeline, only from_pretrained differs.

--compare also runs the sequential pipeline on rank 0. It exits with 1 if a loss or a pixel, which
lies between 0 and 1, differs by more than --tolerance: by default 1e-4, and 0.05 with --bf16.
"""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from comparison import progress, verdict
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from torch import nn

import gpudist
from gpudist import CartesianPartition, checkpoint

# Time that the other workers wait for rank 0, which runs the sequential pipeline alone.
TIMEOUT_S = 3600.0


def pipeline(size: int) -> Any:
    """Return a class-conditional pipeline for images of ``size`` x ``size`` pixels."""
    torch.manual_seed(0)
    down, up = ("DownEncoderBlock2D",) * 3, ("UpDecoderBlock2D",) * 3
    vae = AutoencoderKL(3, 3, down, up, (16, 16, 32), norm_num_groups=8, latent_channels=4)
    transformer = DiTTransformer2DModel(
        2, 8, 4, 8, num_layers=2, sample_size=size // 4, norm_num_groups=4
    )
    return DiTPipeline(transformer.eval(), vae, DDIMScheduler())


def images(size: int, count: int, seed: int) -> torch.Tensor:
    """Return waves of random direction and color, with values from -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 1, size)
    wave = 20 * torch.rand(count, 3, 3, 1, 1, generator=generator)
    return (wave[:, 0] * x + wave[:, 1] * x[:, None] + wave[:, 2]).sin()


def run(options: argparse.Namespace, P_x: CartesianPartition | None) -> dict[str, list[float]]:
    """Fine-tune the autoencoder and draw an image, split over ``P_x`` or on one process."""
    pipe = pipeline(options.size)
    criterion: Any = nn.MSELoss()
    if P_x is not None:
        whole = {"x": "split", "z": "split"}
        pipe.vae = gpudist.distribute(pipe.vae, P_x, inputs=whole, methods=("encode", "decode"))
        criterion = gpudist.distribute(criterion, P_x, inputs={"target": "split"})
    is_shown = P_x is None or P_x.rank == 0
    device = torch.device("cpu") if P_x is None else P_x.device
    pipe.to(device)
    pipe.set_progress_bar_config(desc="drawing", disable=not is_shown)
    optimizer = torch.optim.AdamW(pipe.vae.parameters(), lr=options.lr)
    if options.resume:
        checkpoint.load(pipe.vae, options.resume, optimizer)
    name = "sequential" if P_x is None else "split"
    losses: list[float] = []
    with progress(name, options.steps, is_shown) as report:
        for step in range(options.steps):
            x = images(options.size, 2, step).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
                loss = criterion(pipe.vae.decode(pipe.vae.encode(x).latent_dist.mode()).sample, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            report(losses[-1])
    if P_x is not None and options.save:
        checkpoint.save(pipe.vae, options.save, optimizer)

    latents = torch.Generator().manual_seed(options.seed)
    with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
        picture = pipe([207], 4.0, latents, options.inference_steps, "pt").images
    picture = (picture if P_x is None else picture.full_tensor()).float().cpu()
    if is_shown and options.picture:
        pipe.numpy_to_pil(picture.permute(0, 2, 3, 1).numpy())[0].save(options.picture)
    return {"loss": losses, "pixels": picture.flatten().tolist()}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, default=64, help="pixels per side of the image, a multiple of 8")
    add("--grid", type=int, nargs=2, default=[2, 2], help="grid of workers over the image")
    add("--steps", type=int, default=5, help="steps of fine-tuning")
    add("--inference-steps", type=int, default=5, help="steps of the pipeline")
    add("--lr", type=float, default=1e-3, help="of AdamW")
    add("--seed", type=int, default=0, help="of the latents")
    add("--bf16", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--picture", type=Path, metavar="FILE", help="write the drawn image")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint after fine-tuning")
    add("--resume", type=Path, metavar="FOLDER", help="start from a checkpoint")
    add("--compare", action="store_true", help="run the sequential pipeline too, on rank 0")
    add("--tolerance", type=float, help="largest difference of a loss or a pixel")
    options = parser.parse_args()
    if options.resume and options.compare:
        parser.error("--compare starts from the initial values; leave out --resume")
    if options.steps < 1 or options.size % 8:
        parser.error("--steps must be at least 1, and --size a multiple of 8")
    if options.tolerance is None:
        options.tolerance = 0.05 if options.bf16 else 1e-4
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
            print(f"diffusers_vae.py: {text}", file=sys.stderr)
    return P_world.broadcast_data([int(bool(found))])[0]


if __name__ == "__main__":
    sys.exit(main())
