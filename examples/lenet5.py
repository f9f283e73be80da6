"""LeNet-5 on four workers, as in section 5 and appendix C of arXiv:2006.03108.

    torchrun --standalone --nproc-per-node 4 examples/lenet5.py --data digits --compare

Images and convolutions are split over features on a 2 x 2 grid. Then a repartition splits the
channels over two workers, and the weights of the linear layers are split in 2 x 2 blocks over all
four. Every worker reads its block of each batch from its own memory, so that loading sends nothing.

--compare also trains the sequential network, from the same initial values on the same batches,
and exits with 1 if they differ:

- in float64, one of the first 50 losses by more than 1e-9 of its value. Later losses are only
  reported: training amplifies rounding, and networks that add in another order diverge eventually;
- in any precision, the accuracies by more than --tolerance percentage points: by default 0.4 for
  MNIST, 40 of its 10000 test images, and 2 for the digits, 7 of their 360.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from comparison import Result, disagreements, progress, show_results, write_json
from digits import CLASSES, DataError, Images, load
from rich.console import Console
from rich.table import Table
from torch import nn

import gpudist
from gpudist import CartesianPartition, Partition
from gpudist.geometry import Decomposition
from gpudist.nn import (
    DistributedConv2d,
    DistributedCrossEntropyLoss,
    DistributedLinear,
    DistributedMaxPool2d,
    Repartition,
)

WORKERS = 4
# MNIST is padded to the 32 x 32 pixels for which LeNet-5 was designed.
PADDING = {28: 2, 32: 0}
# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0


@dataclass
class Partitions:
    """Partitions of the images and convolutions.

    There are further partitions of the channels, and of the features and weights of linear layers.
    """

    images: CartesianPartition
    channels: CartesianPartition
    features: CartesianPartition
    weights: CartesianPartition

    @classmethod
    def of(cls, P_world: Partition) -> Partitions:
        grid = P_world.grid
        return cls(grid(1, 1, 2, 2), grid(1, 2, 1, 1), grid(1, 2), grid(2, 2))


def distributed_lenet5(P: Partitions, padding: int, dtype: torch.dtype) -> nn.Sequential:
    conv = partial(DistributedConv2d, P.images, dtype=dtype)
    linear = partial(DistributedLinear, P.features, P.features, P.weights, dtype=dtype)
    return nn.Sequential(
        conv(1, 6, 5, padding=padding), nn.ReLU(), DistributedMaxPool2d(P.images, 2),
        conv(6, 16, 5), nn.ReLU(), DistributedMaxPool2d(P.images, 2),
        Repartition(P.images, P.channels), nn.Flatten(),
        linear(400, 120), nn.ReLU(), linear(120, 84), nn.ReLU(), linear(84, CLASSES),
    )  # fmt: skip


def sequential_lenet5(padding: int, dtype: torch.dtype) -> nn.Sequential:
    conv, linear = partial(nn.Conv2d, dtype=dtype), partial(nn.Linear, dtype=dtype)
    return nn.Sequential(
        conv(1, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        conv(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        linear(400, 120), nn.ReLU(), linear(120, 84), nn.ReLU(), linear(84, CLASSES),
    )  # fmt: skip


def show_parameters(network: nn.Sequential, P_world: Partition) -> None:
    """Print on rank 0 which block of every linear layer's parameters each worker holds."""
    layers = [layer for layer in network if isinstance(layer, DistributedLinear)]
    mine = [n for layer in layers for p in layer.parameters() for n in p.shape]
    held = P_world.allgather_data(mine)
    table = Table("weight + bias", *(f"rank {rank}" for rank in range(WORKERS)))
    for i, (name, layer) in enumerate(zip(("C5", "F6", "Output"), layers, strict=True)):
        blocks = [tuple(sizes[3 * i : 3 * i + 3]) for sizes in held]
        rows, columns = layer.out_features // 2, layer.in_features // 2
        expected = [(rows, columns, rows), (rows, columns, 0)] * 2
        assert blocks == expected, f"{name} is held in blocks {blocks}, not {expected}"
        table.add_row(name, *(f"{w} x {n}" + (f" + {b}" if b else "") for w, n, b in blocks))
    if P_world.rank == 0:
        Console().print(table)


class Training:
    """Batches, optimizer and test, which both networks share."""

    def __init__(
        self, options: argparse.Namespace, train: Images, test: Images, device: torch.device
    ) -> None:
        self.device = device
        self.batch, self.epochs = options.batch, options.epochs
        self.lr, self.seed = options.lr, options.seed
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.train, self.test = train, test
        self.padding = PADDING[train.images.shape[-1]]
        steps = self.epochs * -(-len(train) // self.batch)
        self.steps = steps if options.steps is None else min(steps, options.steps)

    def distributed(self, P_world: Partition) -> Result:
        P = Partitions.of(P_world)
        torch.manual_seed(self.seed)
        network = distributed_lenet5(P, self.padding, self.dtype).to(self.device)
        show_parameters(network, P_world)
        cut = Decomposition.balanced(self.train.images.shape[1:], P.images.shape[1:])
        assert P.images.index is not None
        cells = cut.block(P.images.index[1:]).slices
        criterion = DistributedCrossEntropyLoss(P.features)
        losses, seconds = self._fit(
            "distributed", network, criterion, self.train.cut(cells), P_world.rank == 0
        )
        correct = self._count_correct(
            lambda x: gpudist.gather(network(x), P.features), self.test.cut(cells)
        )
        # Only the root of the gather has the count.
        correct = P_world.allreduce_data([correct])[0]
        return Result(100 * correct / len(self.test), losses, seconds)

    def sequential(self) -> Result:
        torch.manual_seed(self.seed)
        network = sequential_lenet5(self.padding, self.dtype).to(self.device)
        losses, seconds = self._fit("sequential", network, nn.CrossEntropyLoss(), self.train)
        correct = self._count_correct(network, self.test)
        return Result(100 * correct / len(self.test), losses, seconds)

    def _fit(
        self,
        name: str,
        network: nn.Module,
        criterion: nn.Module,
        train: Images,
        is_shown: bool = True,
    ) -> tuple[list[float], float]:
        """Return the loss of every step, and the median time of a step."""
        optimizer = torch.optim.Adam(network.parameters(), lr=self.lr)
        losses, seconds = [], []
        with progress(name, self.steps, is_shown) as advance:
            for batch in self._batches():
                start_s = time.perf_counter()
                logits = network(train.images[batch].to(self.device, self.dtype))
                loss = criterion(logits, train.labels[batch].to(self.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                seconds.append(time.perf_counter() - start_s)
                advance(losses[-1])
        return losses, statistics.median(seconds)

    def _batches(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        epochs = (torch.randperm(len(self.train), generator=generator) for _ in range(self.epochs))
        batches = (batch for order in epochs for batch in order.split(self.batch))
        return (batch for _, batch in zip(range(self.steps), batches, strict=False))

    @torch.no_grad()
    def _count_correct(self, predict: Callable[[torch.Tensor], torch.Tensor], test: Images) -> int:
        correct = 0
        for batch in torch.arange(len(test)).split(self.batch):
            logits = predict(test.images[batch].to(self.device, self.dtype))
            if logits.numel():
                correct += int((logits.argmax(1).cpu() == test.labels[batch]).sum())
        return correct


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {text}")
    return int(text)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="digits", help="digits, or the directory of MNIST's four gzipped files")
    add("--epochs", type=positive, default=10)
    add("--steps", type=positive, help="stop after this many steps")
    add("--batch", type=positive, default=256, help="images per step")
    add("--lr", type=float, default=0.001, help="learning rate of Adam")
    add("--seed", type=int, default=0, help="seed of the initial values and the batches")
    add("--dtype", choices=["float32", "float64"], default="float32")
    add("--compare", action="store_true", help="train the sequential network too, on rank 0")
    add("--tolerance", type=float, help="largest difference of accuracies, in percentage points")
    add("--json", type=Path, metavar="FILE", help="write losses, accuracies and times")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: the directory does not exist")
    if options.tolerance is None:
        options.tolerance = 2.0 if options.data == "digits" else 0.4
    return options


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    P_world = gpudist.init(TIMEOUT_S)
    if P_world.size != WORKERS:
        print(
            f"lenet5.py, rank {P_world.rank} of {P_world.size}: the network is cut for {WORKERS} "
            f"workers; start it with\n  torchrun --standalone --nproc-per-node {WORKERS} "
            f"{shlex.join(sys.argv)}",
            file=sys.stderr,
            flush=True,
        )
        # The launcher ends the other workers when one exits.
        P_world.barrier()
        return 2
    try:
        train, test = load(options.data)
    except DataError as error:
        print(f"lenet5.py, rank {P_world.rank}: {error}", file=sys.stderr)
        return 2
    training = Training(options, train, test, P_world.device)
    ours = training.distributed(P_world)
    P_world.barrier()
    failed = False
    if P_world.rank == 0:
        theirs = training.sequential() if options.compare else None
        show_results(ours, theirs)
        if options.json:
            facts = {"command": shlex.join(sys.argv), "data": options.data, "dtype": options.dtype}
            facts |= {"ranks": P_world.size, "transport": P_world.transport}
            write_json(options.json, ours, theirs, facts)
        found = disagreements(ours, theirs, training.dtype, options.tolerance) if theirs else []
        for text in found:
            print(f"lenet5.py: the networks differ: {text}", file=sys.stderr)
        failed = bool(found)
    return P_world.broadcast_data([failed])[0]


if __name__ == "__main__":
    sys.exit(main())
