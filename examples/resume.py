"""Training that resumes after the death of a worker, with bitwise equal results.

    torchrun --standalone --nproc-per-node 4 --max-restarts 10 examples/resume.py --folder runs/1

When a worker dies, torchrun ends the others and restarts all of them, up to --max-restarts times.
They load the last complete checkpoint, which contains everything on which a step depends:
parameters, averages of the batch norm, state of Adam, call numbers and seed of dropout, and the
step number. The step number determines the batch, and with ``deterministic=True`` the result of a
step depends on nothing else.

Every loss is written to FOLDER/losses exactly; a repeated step appears twice. At the end, rank 0
prints a digest of the network. Any other run on as many workers, interrupted or not, prints the
same digest.
"""

from __future__ import annotations

import argparse
import sys
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

import gpudist
from gpudist import CartesianPartition, Partition, checkpoint
from gpudist.geometry import Decomposition
from gpudist.nn import (
    DistributedBatchNorm,
    DistributedConv2d,
    DistributedDropout2d,
    DistributedMSELoss,
)

SHAPE = (4, 3, 32, 32)


class Training(nn.Module):
    """A network that removes noise from images, and its number of training steps so far."""

    step: torch.Tensor

    def __init__(self, P_x: CartesianPartition) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.network = nn.Sequential(
            DistributedConv2d(P_x, 3, 16, 3, padding=1),
            DistributedBatchNorm(P_x, 16),
            nn.ReLU(),
            DistributedDropout2d(P_x, 0.1),
            DistributedConv2d(P_x, 16, 3, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


def batch_of(step: int, P_x: CartesianPartition) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this worker's block of a step's noisy images and of the clean ones."""
    generator = torch.Generator().manual_seed(step)
    phase = torch.rand(SHAPE[:2], generator=generator)[..., None, None]
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    images = torch.sin(6 * phase + (rows + phase * columns) / 4)
    noisy = images + 0.3 * torch.randn(SHAPE, generator=generator)
    cells = Decomposition.balanced(SHAPE, P_x.shape).block(P_x.index or ()).slices
    blocks = noisy[cells].contiguous(), images[cells].contiguous()
    return blocks[0].to(P_x.device), blocks[1].to(P_x.device)


def train(P_world: Partition, folder: Path, steps: int, every: int) -> str:
    """Train to ``steps``, from the last checkpoint in ``folder`` if there is one.

    Args:
        P_world: all workers, which split the columns of the images.
        folder: folder that all workers can access.
        steps: total number of steps.
        every: number of steps between checkpoints.

    Returns:
        A digest of the trained network on rank 0; an empty string on the others.
    """
    P_x = P_world.grid(1, 1, 1, P_world.size)
    torch.manual_seed(0)
    training = Training(P_x).to(P_world.device)
    criterion = DistributedMSELoss(P_x)
    optimizer = torch.optim.Adam(training.parameters(), lr=0.01)
    latest = folder / "latest"
    # Rank 0 checks for all workers, because a shared file system may show a new file to only some.
    if P_world.broadcast_data([int(P_world.rank == 0 and checkpoint.exists(latest))])[0]:
        checkpoint.load(training, latest, optimizer)
    while int(training.step) < steps:
        noisy, clean = batch_of(int(training.step), P_x)
        loss = criterion(training(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if P_world.rank == 0:
            with (folder / "losses").open("a") as losses:
                losses.write(f"{int(training.step)} {loss.item().hex()}\n")
        training.step += 1
        if int(training.step) % every == 0:
            checkpoint.save(training, latest, optimizer)
    return digest_of(training)


def digest_of(training: Training) -> str:
    state = checkpoint.full_state_dict(training)
    digest = sha256()
    for name, value in sorted((state or {}).items()):
        digest.update(name.encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if state else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints and losses")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=60.0, help="of a worker, in seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    P_world = gpudist.init(options.timeout, deterministic=True)
    digest = train(P_world, options.folder, options.steps, options.every)
    if P_world.rank == 0:
        print(f"the network after {options.steps} steps: {digest}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
