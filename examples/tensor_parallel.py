"""A small GPT on rows of workers: each row shares one copy, and reads its own texts.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py --steps 50 --compare
    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py --data-parallel 1 \\
        --tensor-parallel 4 --attention ring --compare

The network learns to write Python's documentation. At every step, the first worker of each row
draws samples of 50 to 512 tokens, pads them to the longest one, and broadcasts the batch, whose
shape only this worker knows, to its row. --sequence-parallel splits tensors between layers along
the sequence; ring and all-to-all attention keep it split without --sequence-parallel.


--compare also trains the sequential network, from the same initial values on the samples of all
rows together, on rank 0. It exits with 1 if a loss differs by more than --tolerance of its value,
or the final parameters by more than --tolerance of their norm: by default 1e-9 in float64 and 0.05
in float32.

"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison import progress
from gpt import GPT, Cut, ParallelGPT, Sizes
from rich.console import Console
from rich.table import Table
from texts import IGNORED, VOCABULARY, Batch, Documentation, joined
from torch import nn

import gpudist
from gpudist import CartesianPartition, Partition, checkpoint
from gpudist.nn import VocabParallelCrossEntropyLoss

TOLERANCES = {"float64": 1e-9, "float32": 0.05}
# Time that the other workers wait for rank 0, which trains the sequential network alone.
TIMEOUT_S = 3600.0


@dataclass
class Result:
    """Outcome of a training: each step's loss and longest sample, and the median time of a step."""

    loss: list[float]
    seconds_per_step: float
    lengths: list[int]


class Training:
    """Settings and data that both networks share."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.sizes = Sizes(
            VOCABULARY, options.longest, options.width, options.heads, options.layers
        )
        self.dtype: torch.dtype = getattr(torch, options.dtype)

    def documentation(self) -> Documentation:
        options = self.options
        return Documentation(options.samples, options.shortest, options.longest, options.seed)

    def fit(
        self,
        network: nn.Module,
        criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        read: Callable[[int], Batch],
        report: Callable[[float], None],
    ) -> Result:
        """Train on the batch that ``read`` returns at each step."""
        optimizer = torch.optim.Adam(network.parameters(), lr=self.options.lr)
        result, seconds = Result([], 0.0, []), []
        for step in range(self.options.steps):
            start_s = time.perf_counter()
            batch = read(step)
            loss = criterion(network(batch.tokens), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            result.loss.append(loss.item())
            result.lengths.append(batch.tokens.shape[1])
            seconds.append(time.perf_counter() - start_s)
            report(result.loss[-1])
        result.seconds_per_step = statistics.median(seconds)
        return result

    def parallel(self, P: CartesianPartition) -> tuple[nn.Module, Result]:
        """Train on all workers of ``P``."""
        options = self.options
        cut = Cut(P, options.sequence_parallel or options.attention != "heads", options.attention)
        torch.manual_seed(options.seed)
        network = ParallelGPT(self.sizes, cut).to(self.device, self.dtype)
        assert P.index is not None
        row, column = P.index
        texts = self.documentation() if column == 0 else None

        def read(step: int) -> Batch:
            own = texts.batch(step, row) if texts is not None else None
            return gpudist.broadcast_batch(own, P, axes=(1,))

        criterion = VocabParallelCrossEntropyLoss(P, ignore_index=IGNORED)
        with progress("distributed", options.steps, P.rank == 0) as report:
            return network, self.fit(network, criterion, read, report)

    def alone(self, rows: int) -> tuple[nn.Module, Result]:
        """Train the sequential network on the samples of all rows."""
        options, texts = self.options, self.documentation()
        torch.manual_seed(options.seed)
        network = GPT(self.sizes).to(self.device, self.dtype)

        def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy
            return loss(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

        def read(step: int) -> Batch:
            batch = joined([texts.batch(step, row) for row in range(rows)])
            return Batch(batch.tokens.to(self.device), batch.targets.to(self.device))

        with progress("sequential", options.steps, True) as report:
            return network, self.fit(network, criterion, read, report)


def parameter_difference(ours: dict[str, torch.Tensor], theirs: nn.Module) -> float:
    """Return the norm of the difference of all parameters, relative to their norm."""
    wholes = {name: p.detach().cpu() for name, p in theirs.named_parameters()}
    assert ours.keys() == wholes.keys()
    error = sum(float((ours[name] - p).square().sum()) for name, p in wholes.items())
    return (error / sum(float(p.square().sum()) for p in wholes.values())) ** 0.5


def disagreements(loss: float, parameters: float, tolerance: float) -> list[str]:
    """Describe the differences that are larger than ``tolerance``."""
    found = [("a loss differs", loss, "value"), ("the parameters differ", parameters, "norm")]
    return [
        f"{what} by {much:.2e} of the {of}, more than {tolerance:g}"
        for what, much, of in found
        if not much <= tolerance
    ]


def show(ours: Result, theirs: Result | None, numbers: list[int], everything: int) -> None:
    """Print both trainings side by side, and the number of parameters of each worker."""
    results = [ours] if theirs is None else [ours, theirs]
    table = Table("", *("distributed", "sequential")[: len(results)])
    table.add_row("first loss", *(f"{r.loss[0]:.6f}" for r in results))
    table.add_row("last loss", *(f"{r.loss[-1]:.6f}" for r in results))
    table.add_row("longest samples", *(f"{min(r.lengths)} to {max(r.lengths)}" for r in results))
    table.add_row("time per step", *(f"{1e3 * r.seconds_per_step:.0f} ms" for r in results))
    held = [f"{min(numbers)} to {max(numbers)} a worker", str(everything)]
    table.add_row("parameters", *held[: len(results)])
    Console().print(table)


def run(P_world: Partition, options: argparse.Namespace) -> int:
    training = Training(options, P_world.device)
    grid = [options.data_parallel, options.tensor_parallel]
    P = P_world.create_cartesian_topology_partition(grid)
    network, ours = training.parallel(P)
    whole = checkpoint.full_state_dict(network)
    (numbers,) = zip(
        *P_world.allgather_data([sum(p.numel() for p in network.parameters())]), strict=True
    )
    facts: dict[str, Any] = {
        "command": shlex.join(sys.argv), "ranks": P_world.size, "grid": grid,
        "transport": P_world.transport, "dtype": options.dtype, "torch": torch.__version__,
        "loss": ours.loss, "seconds_per_step": ours.seconds_per_step, "lengths": ours.lengths,
        "parameters": list(numbers), "all_parameters": sum(p.numel() for p in whole.values()),
    }  # fmt: skip
    found: list[str] = []
    if P_world.rank == 0:
        theirs = None
        if options.compare:
            sequential, theirs = training.alone(options.data_parallel)
            pairs = zip(ours.loss, theirs.loss, strict=True)
            loss = max(abs(a - b) / abs(b) for a, b in pairs)
            parameters = parameter_difference(whole, sequential)
            found = disagreements(loss, parameters, options.tolerance)
            facts |= {
                "sequential_loss": theirs.loss,
                "sequential_seconds_per_step": theirs.seconds_per_step,
                "loss_difference": loss, "parameter_difference": parameters,
            }  # fmt: skip
        show(ours, theirs, facts["parameters"], facts["all_parameters"])
        if theirs is not None:
            print(
                f"{grid[0]} x {grid[1]} workers against one, after {options.steps} steps: a loss "
                f"differs by up to {facts['loss_difference']:.1e} of its value, the parameters by "
                f"{facts['parameter_difference']:.1e} of their norm"
            )
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for text in found:
            print(f"tensor_parallel.py: the networks differ: {text}", file=sys.stderr)
    return P_world.broadcast_data([len(found) > 0])[0]


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {text}")
    return int(text)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-parallel", type=positive, default=2, help="rows of workers")
    add("--tensor-parallel", type=positive, default=2, help="workers of a row")
    add("--sequence-parallel", action="store_true", help="split tensors between layers")
    add("--attention", choices=["heads", "ring", "all-to-all"], default="heads")
    add("--steps", type=positive, default=50)
    add("--samples", type=positive, default=4, help="of a row at each step")
    add("--shortest", type=positive, default=50, help="tokens of a sample")
    add("--longest", type=positive, default=512, help="tokens of a sample")
    add("--width", type=positive, default=64, help="features, a multiple of --heads")
    add("--heads", type=positive, default=4)
    add("--layers", type=positive, default=2)
    add("--lr", type=float, default=0.003, help="of Adam")
    add("--seed", type=int, default=0, help="seed of the initial values and the samples")
    add("--dtype", choices=["float32", "float64"], default="float64")
    add("--compare", action="store_true", help="train the sequential network too, on rank 0")
    add("--tolerance", type=float, help="relative tolerance of the comparison")
    add("--json", type=Path, metavar="FILE", help="write losses, lengths and times")
    options = parser.parse_args(arguments)
    if options.width % options.heads or options.shortest > options.longest:
        parser.error("--width must be a multiple of --heads, and --shortest at most --longest")
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.dtype]
    return options


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    P_world = gpudist.init(TIMEOUT_S)
    workers = options.data_parallel * options.tensor_parallel
    if P_world.size == workers:
        return run(P_world, options)
    print(
        f"tensor_parallel.py, rank {P_world.rank} of {P_world.size}: {options.data_parallel} rows "
        f"of {options.tensor_parallel} are {workers} workers; start it with\n  torchrun "
        f"--standalone --nproc-per-node {workers} {shlex.join(sys.argv)}",
        file=sys.stderr,
        flush=True,
    )
    # The launcher ends the other workers when one exits.
    P_world.barrier()
    return 2


if __name__ == "__main__":
    sys.exit(main())
