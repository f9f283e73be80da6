"""Search plans of layouts of four networks on 8 and 64 workers, and state times and results.

    python -m benchmarks.searches --random 1000 --json benchmarks/results/plan/searches.jsonl

For each network and number of workers, the program prints the CPU time of the search, the predicted
step on the best grid and under the plan, and kernels, messages and bytes of the slowest rank's
rehearsed step. ``--random`` compares the exact optimum on a grid of 8 workers that splits space or
tokens with that many random choices, each improved by single changes until none helps. The exit
status is 1 if a random choice is faster, or a search takes longer than 60 s on one core. ``--table
FILE`` prints the rows of a file as the table of benchmarks/MEASUREMENTS.md, and searches nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.environment import environment
from examples.networks import UNet3d
from gpudist.planning import Profile, profile_of, search
from gpudist.planning.advice import Advice, advice_on, dry_network, rank_grids
from gpudist.planning.layout_search import choices_of
from gpudist.planning.table import bytes_of, seconds_of
from tests.planning.descent import Descent, random_choice
from tests.zoo.operators import declare_missing_operators

LIMIT_S = 60.0
WORKERS = (8, 64)
PROFILE = "h100"


def _resnet50() -> tuple[nn.Module, torch.Tensor]:
    declare_missing_operators()
    from torchvision.models import resnet50

    return resnet50(), torch.empty(8, 3, 224, 224, device="meta")


def _swin() -> tuple[nn.Module, torch.Tensor]:
    declare_missing_operators()
    import timm

    network = timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0)
    return network, torch.empty(8, 3, 224, 224, device="meta")


def _gpt() -> tuple[nn.Module, torch.Tensor]:
    declare_missing_operators()
    from transformers import GPT2Config, GPT2LMHeadModel

    network = GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0))
    return network, torch.empty(8, 1024, dtype=torch.int64, device="meta")


NETWORKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "U-Net, 2 of 128^3": lambda: (UNet3d(1, 3), torch.empty(2, 1, 128, 128, 128, device="meta")),
    "ResNet-50, 8 of 224^2": _resnet50,
    "Swin-T, 8 of 224^2": _swin,
    "GPT-2, 8 of 1024 tokens": _gpt,
}
# Grids for random choices, of 8 workers. Along the first axis, tensors are never whole.
SPLIT = dict(zip(NETWORKS, [(1, 1, 2, 2, 2), (1, 1, 4, 2), (2, 1, 4, 1), (2, 4)], strict=True))


@dataclass(frozen=True)
class Searched:
    """Result of a search.

    Attributes:
        network: name of the network.
        workers: number of workers.
        search_cpu_s: CPU time of the search, which compares three grids.
        grid_alone: grid that is fastest without layouts.
        alone_us: predicted time of a step on it.
        grid: grid of the plan.
        planned_us: predicted time of a step under the plan.
        layouts: number of layouts that the plan prescribes.
        kernels: kernels of a step of the slowest rank, without those that pack.
        messages: messages and collectives that it sends in a step.
        sent_bytes: bytes in them.
        kernels_alone, messages_alone, sent_bytes_alone: those without layouts, on ``grid_alone``.
        notes: explanation of the plan.
    """

    network: str
    workers: int
    search_cpu_s: float
    grid_alone: tuple[int, ...]
    alone_us: float
    grid: tuple[int, ...]
    planned_us: float
    layouts: int
    kernels: int
    messages: int
    sent_bytes: int
    kernels_alone: int
    messages_alone: int
    sent_bytes_alone: int
    notes: list[str]

    def __str__(self) -> str:
        planned, alone = (seconds_of(1e-6 * us) for us in (self.planned_us, self.alone_us))
        return (
            f"{self.network}, {self.workers} workers: {planned} on {list(self.grid)} with "
            f"{self.layouts} layouts, {alone} on {list(self.grid_alone)}; {self.kernels} kernels "
            f"({self.kernels_alone}), {self.messages} messages ({self.messages_alone}), "
            f"{bytes_of(self.sent_bytes)} ({bytes_of(self.sent_bytes_alone)}); searched in "
            f"{self.search_cpu_s:.1f} s"
        )

    def row(self) -> str:
        """Return the row of the table in benchmarks/MEASUREMENTS.md."""
        alone, planned = (
            f"{list(grid)}, {seconds_of(1e-6 * us)}"
            for grid, us in ((self.grid_alone, self.alone_us), (self.grid, self.planned_us))
        )
        return (
            f"| {self.network} | {self.workers} | {alone} | {planned} | {self.layouts} "
            f"| {self.kernels} ({self.kernels_alone}) | {self.messages} ({self.messages_alone}) "
            f"| {1e-6 * self.sent_bytes:.1f} ({1e-6 * self.sent_bytes_alone:.1f}) "
            f"| {self.search_cpu_s:.0f} s |"
        )


@dataclass(frozen=True)
class Random:
    """Random choices of layouts, improved by single changes.

    Attributes:
        network: name of the network.
        grid: grid of the workers.
        variables: number of layouts to choose.
        count: number of choices.
        best_us: smallest sum of them.
        median_us: median sum.
        optimum_us: sum of the exact optimum.
        is_exact: whether no table was too large.
    """

    network: str
    grid: tuple[int, ...]
    variables: int
    count: int
    best_us: float
    median_us: float
    optimum_us: float
    is_exact: bool

    def __str__(self) -> str:
        return (
            f"{self.network} on {list(self.grid)}: optimum of {self.variables} layouts "
            f"{self.optimum_us:.1f} us, best of {self.count} random choices "
            f"{self.best_us:.1f} us, their median {self.median_us:.1f} us"
        )


def search_layouts(name: str, workers: int, profile: Profile) -> Searched:
    """Search a plan of a network on a number of workers."""
    network, x = NETWORKS[name]()
    start_s = time.process_time()
    plan = search(network, x, profile=profile, workers=workers)
    search_cpu_s = time.process_time() - start_s
    dry = dry_network(network, x, profile, True, "adam", False, None)
    assert plan.grid is not None
    best, alone = advice_on(dry, plan.grid, plan=plan), rank_grids(dry, workers)[0]
    return Searched(
        name, workers, search_cpu_s, alone.grid, 1e6 * alone.seconds, plan.grid,
        1e6 * best.seconds, len(plan.layouts), *_counts(best, profile), *_counts(alone, profile),
        plan.notes,
    )  # fmt: skip


def _counts(advice: Advice, profile: Profile) -> tuple[int, int, int]:
    """Return kernels, messages and bytes of the slowest rank's step."""
    phases = advice.slowest.forward, advice.slowest.backward
    starts_s = sum(phase.terms_s.get("kernel starts", 0.0) for phase in phases)
    return (
        round(starts_s / (1e-6 * profile.kernel_us)),
        sum(phase.messages + phase.collectives for phase in phases),
        sum(phase.message_bytes + phase.collective_bytes for phase in phases),
    )


def compare(name: str, profile: Profile, count: int) -> Random:
    """Compare the optimum with random choices, improved by single changes."""
    network, x = NETWORKS[name]()
    dry = dry_network(network, x, profile, True, "adam", False, None)
    found = choices_of(dry, SPLIT[name], 0)
    solved = found.solve(1)
    draw, descent = random.Random(1), Descent(found)
    costs = (found.cost(descent.improve(random_choice(found, draw))) for _ in range(count))
    times = sorted(cost[0] for cost in costs if cost is not None)
    return Random(
        name, SPLIT[name], sum(size > 1 for size in found.sizes), count,
        1e6 * times[0], 1e6 * times[len(times) // 2], 1e6 * solved.best[0][0], solved.is_exact,
    )  # fmt: skip


def main() -> int:
    options = _options()
    if options.table:
        lines = map(json.loads, options.table.read_text(encoding="utf-8").splitlines())
        print(*(Searched(**one["Searched"]).row() for one in lines if "Searched" in one), sep="\n")
        return 0
    command = " ".join(["python -m benchmarks.searches", *sys.argv[1:]])
    profile = profile_of(PROFILE)
    rows: list[Any] = []
    missed: list[str] = []
    for name in options.network or NETWORKS:
        for workers in options.workers:
            one = search_layouts(name, workers, profile)
            print(one, *one.notes[1:], sep="\n  ", flush=True)
            rows.append(one)
            if one.search_cpu_s > LIMIT_S:
                missed.append(f"{name}, {workers} workers: searched in {one.search_cpu_s:.0f} s")
        if options.random:
            best = compare(name, profile, options.random)
            print(best, flush=True)
            rows.append(best)
            if best.best_us < best.optimum_us - 1e-6:
                missed.append(f"{name}: a random choice is faster")
    if options.json:
        here = environment(command, options.random) | {"profile": PROFILE}
        lines = [{"environment": here}, *({type(one).__name__: asdict(one)} for one in rows)]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        options.json.write_text(text, encoding="utf-8")
    for words in missed:
        print(f"missed: {words}")
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.searches", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS, help="workers")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="only this one")
    parser.add_argument("--random", type=int, default=0, help="random choices for each network")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a file")
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
