"""Measure searched plans of layouts beside others, and compare their order with the predicted one.

    python -m benchmarks.plans --json benchmarks/results/plan/layouts-2.jsonl

Measures a profile of this machine. For each network and batch, 20 plans are then fixed, with their
predicted times, before any is timed: grids without layouts, layouts by hand, the best of a search,
the next best, and drawn stretches of functions that every worker computes whole. Their
kernels are timed before. Training steps under all plans take turns over local processes, and a step
is compared with the others of its round. The program prints, for each network, the rank correlation
of predicted and measured times, how much slower the searched plan is than the fastest one, and its
ratio to the best grid, predicted and measured. The exit status is 1 if a limit is missed. Results
of a machine with other load are meaningless.

The first line of the file has the environment and the profile, each other line a plan.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import correlation, median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import gpudist
from benchmarks.environment import environment
from benchmarks.ledger.networks import SUBJECTS, Subject
from benchmarks.plan import profile_here
from gpudist import GpudistError, Plan
from gpudist.geometry import Decomposition
from gpudist.planning import Advice, Profile, profile_of
from gpudist.planning.advice import advice_on, rank_grids
from gpudist.planning.kernel_times import kernels_of, times_of, with_times
from gpudist.planning.layout_search import Search
from gpudist.planning.rehearsal import DryNetwork
from gpudist.sbp import GlobalTensor, broadcast, split
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.planning.stretches import stretch

LIMIT_S = 500.0
HOW: dict[str, Any] = {"transport": "host", "timeout": LIMIT_S}
LEAST_CORRELATION, LARGEST_REGRET, LARGEST_ERROR = 0.8, 0.05, 0.10
# Plans; and of them grids, grids whose layouts are searched, and next best plans of each of these.
PLANS, GRIDS, SEARCHED, NEXT = 20, 3, 2, 2


@dataclass(frozen=True)
class Network:
    """A network of the ledger, its input, and stretches that plans by hand keep whole.

    Attributes:
        subject: name of the network in the ledger.
        size: spatial size of the input, or number of tokens.
        stretches: first module of a stretch and first module after it; ``""`` for none.
    """

    subject: str
    size: tuple[int, ...]
    stretches: tuple[tuple[str, str], ...]

    @property
    def of_ledger(self) -> Subject:
        return SUBJECTS[self.subject]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        network = self.of_ledger.make(self.size)
        module: Any
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            # Stochastic depth gathers whole tensors.
            elif hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
        return network

    def shape(self, batch: int) -> tuple[int, ...]:
        channels = self.of_ledger.inputs
        return (batch, channels, *self.size) if channels else (batch, *self.size)

    def block(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(*shape) if self.of_ledger.inputs else torch.randint(50, tuple(shape))


NETWORKS = {
    "U-Net 16^3": Network(
        "U-Net, group norm", (16, 16, 16), (("down.1", "grow.1"), ("down.2", "grow.0"))
    ),
    "U-Net 8^3": Network(
        "U-Net, group norm", (8, 8, 8), (("down.1", "grow.1"), ("down.2", "grow.0"))
    ),
    "ResNet-50 64^2": Network("ResNet-50", (64, 64), (("layer2", ""), ("layer3", ""))),
    "Swin": Network("Swin", (224, 112), (("layers.0", ""), ("layers.1", ""))),
    "GPT, 32 tokens": Network("GPT", (32,), (("transformer.h.0", ""), ("transformer.h.2", ""))),
}


@dataclass(frozen=True)
class Planned:
    """A plan and its prediction.

    Attributes:
        kind: its origin: ``"grid"``, ``"by hand"``, ``"search"`` or ``"drawn"``.
        advice: the prediction.
        is_searched: whether it is the one that the search returns.
    """

    kind: str
    advice: Advice
    is_searched: bool = False

    @property
    def text(self) -> str:
        return "" if self.advice.plan is None else self.advice.plan.to_text()


def plans_of(network: Network, batch: int, ranks: int, profile: Profile) -> list[Planned]:
    """Return the plans to time, each with layouts of its own; fewer if a network has fewer."""
    dry = DryNetwork(network.make(), network.block(network.shape(batch)), profile)
    grids = rank_grids(dry, ranks)[:GRIDS]
    found = [Planned("grid", one) for one in grids]
    searches = [Search(dry, one) for one in grids[:SEARCHED]]
    best = min(searches, key=lambda one: one.best.seconds).best
    if best.plan is None:
        found = [Planned("grid", one.advice, one.advice is best) for one in found]
    for one in searches:
        if one.best.plan is not None:
            found.append(Planned("search", one.best, one.best is best))

    def add(kind: str, grid: Sequence[int], plans: Iterator[Plan], most: int) -> None:
        """Add plans that can be followed, and have other layouts than those before."""
        known = [(x.advice.grid, x.advice.plan.layouts) for x in found if x.advice.plan is not None]
        for plan in plans:
            if most == 0 or len(found) >= PLANS:
                break
            if plan.layouts and (tuple(grid), plan.layouts) not in known:
                known.append((tuple(grid), plan.layouts))
                try:
                    found.append(Planned(kind, advice_on(dry, grid, plan=plan)))
                    most -= 1
                except GpudistError as error:
                    print(f"a plan on {list(grid)} cannot be followed: {error}")

    for one in grids:
        stretches = (whole(one.grid, *stretch) for stretch in network.stretches)
        add("by hand", one.grid, stretches, len(network.stretches))
    for one in searches:
        others = (
            Plan(layouts=one.choices.pins(choice, one.modules))
            for _, choice in one.choices.solve(10).best
        )
        add("search", one.alone.grid, others, NEXT)
    for number, one in enumerate(searches, 1):
        add(
            "drawn",
            one.alone.grid,
            _plans_of_random_stretches(one),
            (PLANS - len(found)) * number // len(searches),
        )
    return found


def _plans_of_random_stretches(search: Search, tries: int = 200) -> Iterator[Plan]:
    draw, choices = random.Random(0), search.choices
    for _ in range(tries):
        start, stop = sorted(draw.sample(range(len(choices.nodes)), 2))
        choice = stretch(choices, start, stop, draw.choice(choices.states))
        if choices.cost(choice) is not None:
            yield Plan(layouts=choices.pins(choice, search.modules))


def whole(grid: Sequence[int], first: str, after: str) -> Plan:
    """Return a plan in which every worker computes the whole of a stretch of modules."""
    plan = Plan()
    plan.layout(first, broadcast, at="input")
    if after:
        plan.layout(after, [split(dim) for dim in range(len(grid))], at="input")
    return plan


def measure(
    P_world: Partition, name: str, batch: int, plans: list[tuple[Any, str]], rounds: int
) -> list[list[int]]:
    """Return the nanoseconds of all steps under each plan, of the slowest rank, in turns."""
    torch.set_num_threads(1)
    network, steps = NETWORKS[name], list[tuple[nn.Module, torch.Tensor]]()
    for grid, text in plans:
        P_x = P_world.create_cartesian_topology_partition(grid)
        assert P_x.index is not None
        block = Decomposition.balanced(network.shape(batch), grid).block(P_x.index)
        plan = Plan.from_text(text) if text else None
        converted = gpudist.distribute(network.make(), P_x, plan)
        torch.manual_seed(P_world.rank or 0)
        steps.append((converted, network.block(block.shape)))
    found: list[list[int]] = [[] for _ in plans]
    # In the first two rounds, layers and plans are made.
    for turn in range(-2, rounds):
        for (converted, x), times in zip(steps, found, strict=True):
            # As in training, the caches have what a step of the same network has left.
            _step_s(P_world, converted, x)
            mine = int(1e9 * _step_s(P_world, converted, x))
            slowest = P_world.allreduce_data([mine], "max")[0]
            if turn >= 0:
                times.append(slowest)
    return found


def _step_s(P_world: Partition, network: nn.Module, x: torch.Tensor) -> float:
    network.zero_grad()
    P_world.barrier()
    start_s = time.perf_counter()
    leaves = [y.to_local() for y in tree_leaves(network(x)) if isinstance(y, GlobalTensor)]
    ends = [y for y in leaves if y.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(y) for y in ends])
    return time.perf_counter() - start_s


def rows_of(name: str, batch: int, planned: Sequence[Planned], times: Any) -> list[dict[str, Any]]:
    return [
        {
            "network": name, "batch": batch, "kind": one.kind, "is_searched": one.is_searched,
            "grid": list(one.advice.grid), "plan": json.loads(one.text) if one.text else None,
            "predicted_us": 1e6 * one.advice.seconds, "measured_us": 1e-3 * measured,
            "all_us": [1e-3 * t for t in own],
        }
        for one, own, measured in zip(planned, times, paired(times), strict=True)
    ]  # fmt: skip


def paired(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the typical time of each plan, compared with the others of the same round.

    A machine may be half as fast for some rounds. The time of a plan is therefore its median ratio
    to the median of a round, times the median of all rounds.
    """
    rounds = [median(each) for each in zip(*times, strict=True)]
    usual = median(rounds)
    return [usual * median(t / each for t, each in zip(own, rounds, strict=True)) for own in times]


@dataclass(frozen=True)
class Summary:
    """Predicted and measured times of the plans of one network and batch.

    Attributes:
        name: network and batch.
        rank_correlation: Spearman's coefficient of predicted and measured times.
        regret: by how much the searched plan is slower than the fastest one.
        predicted, measured: ratio of the searched plan to the grid that is predicted to be fastest.
    """

    name: str
    rank_correlation: float
    regret: float
    predicted: float
    measured: float

    def __str__(self) -> str:
        return (
            f"{self.name}: rank correlation {self.rank_correlation:.2f}, searched plan "
            f"{100 * self.regret:.1f} % slower than the fastest, {self.measured:.3f} of the best "
            f"grid (predicted {self.predicted:.3f})"
        )

    @property
    def missed(self) -> list[str]:
        """Limits that are missed."""
        found = {
            "rank correlation": self.rank_correlation < LEAST_CORRELATION,
            "slower than the fastest": self.regret > LARGEST_REGRET,
            "ratio to the best grid": abs(self.predicted / self.measured - 1) > LARGEST_ERROR,
        }
        return [f"{self.name}: {words}" for words, is_missed in found.items() if is_missed]


def summary(rows: Sequence[dict[str, Any]]) -> Summary:
    """Summarize the rows of a network and a batch."""
    predicted, measured = ([row[key] for row in rows] for key in ("predicted_us", "measured_us"))
    (searched,) = (row for row in rows if row["is_searched"])
    grid = min((r for r in rows if r["kind"] == "grid"), key=lambda r: r["predicted_us"])
    return Summary(
        f"{rows[0]['network']}, batch {rows[0]['batch']}",
        correlation(_places_in_order(predicted), _places_in_order(measured)),
        searched["measured_us"] / min(measured) - 1,
        searched["predicted_us"] / grid["predicted_us"],
        searched["measured_us"] / grid["measured_us"],
    )


def _places_in_order(values: Sequence[float]) -> list[float]:
    # Equal values share the mean of their places.
    return [sum((a < x) + (a <= x) for a in values) / 2 for x in values]


def main() -> int:
    options = _options()
    command = " ".join(["python -m benchmarks.plans", *sys.argv[1:]])
    here = environment(command, options.rounds)
    if options.profile is None:
        profile = run_distributed(profile_here, options.ranks, **HOW)[0]
    else:
        profile = profile_of(options.profile)
    here |= {"ranks": options.ranks, "profile": asdict(profile)}
    lines: list[Any] = [{"environment": here}]
    found: list[Summary] = []
    for name in options.network or NETWORKS:
        for batch in options.batch:
            timed = with_kernels_of_plans(profile, NETWORKS[name], batch, options.ranks)
            planned = plans_of(NETWORKS[name], batch, options.ranks, timed)
            plans = [(one.advice.grid, one.text) for one in planned]
            given = name, batch, plans, options.rounds
            times = run_distributed(measure, options.ranks, *given, **HOW)[0]
            rows = rows_of(name, batch, planned, times)
            lines += rows
            found.append(summary(rows))
            _show(rows, found[-1])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        options.json.write_text(text, encoding="utf-8")
    missed = [words for one in found for words in one.missed]
    for words in missed:
        print(f"missed: {words}")
    return 1 if missed else 0


def with_kernels_of_plans(profile: Profile, network: Network, batch: int, ranks: int) -> Profile:
    return with_times(
        profile,
        lambda known: kernels_of(known, lambda p: plans_of(network, batch, ranks, p)),
        lambda keys: run_distributed(times_here, ranks, keys, **HOW)[0],
    )


def times_here(P_world: Partition, keys: Sequence[str]) -> dict[str, float]:
    """Return the seconds of kernels on processes with one thread."""
    torch.set_num_threads(1)
    return times_of(P_world, keys)


def _show(rows: Sequence[dict[str, Any]], found: Summary) -> None:
    print(found)
    for row in rows:
        mark = "*" if row["is_searched"] else " "
        ms = (f"{row[key] / 1e3:8.2f} ms" for key in ("predicted_us", "measured_us"))
        layouts = len(row["plan"]["layouts"]) if row["plan"] else 0
        print(f"{mark} {row['kind']:8} {row['grid']!s:16} {layouts:3} layouts", *ms, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps under each plan")
    parser.add_argument("--profile", help="file of gpudist bench profile (measured here)")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="only this one")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2], help="samples")
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
