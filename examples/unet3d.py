"""A 3-D U-Net that segments a volume, distributed over the workers by one line.

    torchrun --standalone --nproc-per-node 4 examples/unet3d.py --size 64 --compare

The network is plain torch, in networks.py; gpudist.distribute splits it over any grid of workers.
Every worker reads only its block of each crop from the file.

--data brain is the MNI152 template that comes with nilearn: grey matter, white matter and the rest
from T1, trained on the left hemisphere and tested on the right one. --data phases is a solution of
the Allen-Cahn equation, which the program computes: the phase is predicted from a blurred image
with noise.

--compare also trains the sequential network, from the same initial values on the same crops, on
rank 0. It exits with 1 if a loss differs by more than --tolerance of its value, or the final
parameters by more than --tolerance of their norm: by default 1e-8 in float64 and 0.05 in float32.
Training amplifies rounding, so that long runs diverge in any precision.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison import progress
from networks import UNet3d
from rich.console import Console
from rich.table import Table
from torch import nn
from volumes import DataError, Volume, brain, phases, write_phases

import gpudist
from gpudist import CartesianPartition, Partition, checkpoint
from gpudist.geometry import Decomposition
from gpudist.nn import DistributedCrossEntropyLoss

LEVELS = 4
TEST_CROPS = 24
TOLERANCES = {"float64": 1e-8, "float32": 0.05}
# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0


@dataclass
class Result:
    """Losses of a training by step, Dice scores of the classes, and the median time of a step."""

    loss: list[float]
    dice: list[float]
    seconds_per_step: float


class Training:
    """Crops, optimizer and test, which both networks share."""

    def __init__(self, options: argparse.Namespace, volume: Volume, device: torch.device) -> None:
        self.volume, self.size = volume, options.size
        self.width, self.steps, self.lr = options.width, options.steps, options.lr
        self.seed, self.dtype = options.seed, getattr(torch, options.dtype)
        self.device, self.captures = device, options.capture

    def network(self) -> nn.Module:
        torch.manual_seed(self.seed)
        network = UNet3d(1, len(self.volume.classes), self.width, LEVELS)
        return network.to(self.device, self.dtype)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        captures = self.captures and self.device.type == "cuda"
        return torch.optim.Adam(network.parameters(), lr=self.lr, capturable=captures)

    def read(
        self, region: str, corner: Sequence[int], cells: tuple[slice, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cells of a crop on the worker's device, and their classes."""
        x, classes = self.volume.read(region, corner, cells)
        return x.to(self.device, self.dtype), classes.to(self.device)

    def fit(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: nn.Module,
        cells: tuple[slice, ...],
        report: Callable[[float], None],
        captures: bool = False,
    ) -> tuple[list[float], float]:
        """Return each step's loss on the block ``cells`` of random crops, and the median time."""

        def step(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            loss = criterion(own_part(network(x)), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        take = gpudist.capture(step) if captures else step
        generator = torch.Generator().manual_seed(self.seed)
        losses: list[float] = []
        seconds: list[float] = []
        for _ in range(self.steps):
            corner = self.volume.random_corner("train", self.size, generator)
            start_s = time.perf_counter()
            losses.append(take(*self.read("train", corner, cells)).item())
            seconds.append(time.perf_counter() - start_s)
            report(losses[-1])
        return losses, statistics.median(seconds)

    @torch.no_grad()
    def count(self, network: nn.Module, cells: tuple[slice, ...]) -> list[int]:
        """Count the cells of each class in both masks and in either mask, over all test crops."""
        both = torch.zeros(len(self.volume.classes), dtype=torch.int64, device=self.device)
        either = both.clone()
        for corner in self.volume.corners("test", self.size, TEST_CROPS):
            x, classes = self.read("test", corner, cells)
            found = own_part(network(x)).argmax(1)
            both += classes[found == classes].bincount(minlength=len(both))
            either += found.flatten().bincount(minlength=len(both))
            either += classes.flatten().bincount(minlength=len(both))
        return [*both.tolist(), *either.tolist()]


def own_part(y: torch.Tensor) -> torch.Tensor:
    """Return this worker's block of an output; the distributed network's outputs are global."""
    return y.to_local() if isinstance(y, gpudist.GlobalTensor) else y


def dice(counts: list[int]) -> list[float]:
    """Return Dice's score of each class; 1 for a class that does not occur."""
    half = len(counts) // 2
    pairs = zip(counts[:half], counts[half:], strict=True)
    return [2 * both / either if either else 1.0 for both, either in pairs]


def distributed(
    training: Training, P_x: CartesianPartition, options: argparse.Namespace
) -> tuple[nn.Module, Result]:
    """Train on all workers of ``P_x``."""
    how: dict[str, Any] = {"replicate_parameters": False} if options.one_owner else {}
    network = gpudist.distribute(training.network(), P_x, **how)
    optimizer = training.optimizer(network)
    if options.resume:
        checkpoint.load(network, options.resume, optimizer)
    criterion = DistributedCrossEntropyLoss(P_x)
    cells = own_cells(P_x, training.size)
    with progress("distributed", training.steps, P_x.rank == 0) as report:
        losses, seconds = training.fit(
            network, optimizer, criterion, cells, report, options.capture
        )
    if options.save:
        checkpoint.save(network, options.save, optimizer)
    counts = P_x.allreduce_data(training.count(network, cells))
    return network, Result(losses, dice(counts), seconds)


def alone(training: Training) -> tuple[nn.Module, Result]:
    """Train the sequential network on this worker."""
    network = training.network()
    optimizer, cells = training.optimizer(network), (slice(0, training.size),) * 3
    with progress("sequential", training.steps, True) as report:
        losses, seconds = training.fit(network, optimizer, nn.CrossEntropyLoss(), cells, report)
    return network, Result(losses, dice(training.count(network, cells)), seconds)


def own_cells(P_x: CartesianPartition, size: int) -> tuple[slice, ...]:
    """Return this worker's block of a crop."""
    assert P_x.index is not None
    return Decomposition.balanced((size,) * 3, P_x.shape[2:]).block(P_x.index[2:]).slices


def process_grid(size: int) -> tuple[int, ...]:
    """Divide ``size`` workers over the three dims of the volume as evenly as possible."""
    grid, factor = [1, 1, 1], 2
    factors: list[int] = []
    while size > 1:
        if size % factor:
            factor += 1
        else:
            factors.append(factor)
            size //= factor
    for factor in reversed(factors):
        grid[grid.index(min(grid))] *= factor
    return (1, 1, *grid)


def differences(
    ours: Result, theirs: Result, parameters: float, tolerance: float
) -> tuple[float, list[str]]:
    """Return the largest relative difference of a loss, and texts for those above tolerance."""
    pairs = zip(ours.loss, theirs.loss, strict=True)
    loss = max(abs(a - b) / abs(b) for a, b in pairs)
    found = [("a loss differs", loss, "value"), ("the parameters differ", parameters, "norm")]
    return loss, [
        f"{what} by {much:.2e} of the {of}, more than {tolerance:g}"
        for what, much, of in found
        if not much <= tolerance
    ]


def parameter_difference(ours: dict[str, torch.Tensor], theirs: nn.Module) -> float:
    """Return the norm of the difference of all parameters, relative to their norm."""
    pairs = [(ours[name], p.detach().cpu()) for name, p in theirs.named_parameters()]
    error = sum(float((a - b).square().sum()) for a, b in pairs)
    return (error / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


def show(ours: Result, theirs: Result | None, classes: tuple[str, ...]) -> None:
    """Print both trainings side by side."""
    results = [ours] if theirs is None else [ours, theirs]
    table = Table("", *("distributed", "sequential")[: len(results)])
    table.add_row("last loss", *(f"{r.loss[-1]:.6f}" for r in results))
    for i, name in enumerate(classes):
        table.add_row(f"Dice score of {name}", *(f"{r.dice[i]:.3f}" for r in results))
    table.add_row("time per step", *(f"{1e3 * r.seconds_per_step:.0f} ms" for r in results))
    Console().print(table)


def open_volume(options: argparse.Namespace, P_world: Partition, folder: Path) -> Volume:
    """Return the data; rank 0 first creates it in ``folder`` if necessary."""
    if options.data == "brain":
        return brain()
    if P_world.rank == 0:
        write_phases(folder, options.size, options.seed)
    shared = P_world.broadcast_data(list(str(folder).encode()))
    return phases(Path(bytes(shared).decode()))


def run(P_world: Partition, options: argparse.Namespace, folder: Path) -> int:
    training = Training(options, open_volume(options, P_world, folder), P_world.device)
    grid = options.grid or process_grid(P_world.size)
    P_x = P_world.create_cartesian_topology_partition(grid)
    network, ours = distributed(training, P_x, options)
    whole = checkpoint.full_state_dict(network)
    facts: dict[str, Any] = {
        "command": shlex.join(sys.argv), "ranks": P_world.size, "grid": list(grid),
        "transport": P_world.transport, "dtype": options.dtype, "torch": torch.__version__,
        "loss": ours.loss, "dice": ours.dice, "seconds_per_step": ours.seconds_per_step,
    }  # fmt: skip
    found: list[str] = []
    if P_world.rank == 0:
        theirs = None
        if options.compare:
            sequential, theirs = alone(training)
            apart = parameter_difference(whole, sequential)
            loss, found = differences(ours, theirs, apart, options.tolerance)
            facts |= {
                "sequential_loss": theirs.loss, "sequential_dice": theirs.dice,
                "sequential_seconds_per_step": theirs.seconds_per_step,
                "loss_difference": loss, "parameter_difference": apart,
            }  # fmt: skip
        show(ours, theirs, training.volume.classes)
        if theirs is not None:
            print(
                f"{P_world.size} workers against one, after {training.steps} steps: a loss differs "
                f"by up to {facts['loss_difference']:.1e} of its value, the parameters by "
                f"{facts['parameter_difference']:.1e} of their norm"
            )
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for text in found:
            print(f"unet3d.py: the networks differ: {text}", file=sys.stderr)
    if options.pictures:
        from pictures import draw_slices

        draw_slices(options.pictures, training, network, P_x, own_cells(P_x, training.size))
    return P_world.broadcast_data([len(found) > 0])[0]


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {text}")
    return int(text)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", choices=["brain", "phases"], default="brain")
    add("--size", type=positive, default=64, help="cells per side of a crop, a multiple of 8")
    add("--width", type=positive, default=8, help="channels of the first level, a multiple of 4")
    add("--grid", type=positive, nargs=5, help="grid of workers: 1 1, and the dims of the volume")
    add("--steps", type=positive, default=100)
    add("--lr", type=float, default=0.002, help="of Adam")
    add("--seed", type=int, default=0, help="seed of the initial values, the crops and the phases")
    add("--dtype", choices=["float32", "float64"], default="float32")
    add("--one-owner", action="store_true", help="keep every parameter on one worker, not on all")
    add("--capture", action="store_true", help="replay a step as a CUDA graph")
    add("--compare", action="store_true", help="train the sequential network too, on rank 0")
    add("--tolerance", type=float, help="relative tolerance of the comparison")
    add("--json", type=Path, metavar="FILE", help="write losses, scores and times")
    add("--pictures", type=Path, metavar="FOLDER", help="draw slices of a crop of the test")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint at the end")
    add("--resume", type=Path, metavar="FOLDER", help="start from a checkpoint")
    options = parser.parse_args()
    if options.size % (1 << (LEVELS - 1)) or options.width % 4:
        parser.error("--size must be a multiple of 8, and --width of 4")
    if options.resume and options.compare:
        parser.error("--compare starts from the initial values; leave out --resume")
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.dtype]
    return options


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    P_world = gpudist.init(TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="unet3d-") as folder:
        try:
            return run(P_world, options, Path(folder))
        except DataError as error:
            print(f"unet3d.py, rank {P_world.rank}: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
