"""Compare rehearsals of searched plans with what executed steps count, on 4 ranks.

    python -m benchmarks.rehearsals --json benchmarks/results/plan/rehearsals-4.jsonl

For each network, the program searches a plan for 4 workers, rehearses a step of every rank under
it, and executes the step on 4 ranks over test doubles of CUDA and NCCL, with the ledger's counter.
It prints kernels, messages and bytes of both, summed over the ranks. Kernels leave out those that
pack and unpack. The exit status is 1 if messages or bytes differ, or kernels by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import gpudist
from benchmarks.environment import environment
from benchmarks.ledger.counting import Counting
from benchmarks.plans import NETWORKS
from gpudist import Plan
from gpudist.geometry import Decomposition
from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.planning import profile_of, search
from gpudist.planning.advice import dry_network
from gpudist.sbp import GlobalTensor
from gpudist.testing.rank_pool import RankPool
from gpudist.world.partition import Partition
from tests.doubles import use_doubles

RANKS, BATCH, PROFILE = 4, 1, "h100"
CHOSEN = ("U-Net 16^3", "ResNet-50 64^2", "Swin", "GPT, 32 tokens")
LARGEST_ERROR = 0.02
_LIMIT_S = 900.0
# Kernels that pack and unpack; and a key of bytes alone.
_NOT_COUNTED = ("gpudist::launch_combine", "gpudist::bytes")


@dataclass(frozen=True)
class Rehearsed:
    """Rehearsed and counted steps under a searched plan, summed over the ranks.

    Attributes:
        network: name of the network.
        grid: grid of the plan.
        layouts: number of layouts that it prescribes.
        kernels: kernels of the rehearsals, without those that pack.
        kernels_counted: those of the executed step.
        messages: messages and collectives that all ranks send or take part in.
        messages_counted: those of the executed step.
        moved_bytes: bytes in them.
        moved_bytes_counted: those of the executed step.
        operations: operations of the first rank's executed step, by name.
    """

    network: str
    grid: tuple[int, ...]
    layouts: int
    kernels: int
    kernels_counted: int
    messages: int
    messages_counted: int
    moved_bytes: int
    moved_bytes_counted: int
    operations: dict[str, int]

    def __str__(self) -> str:
        return (
            f"{self.network} on {list(self.grid)} with {self.layouts} layouts: "
            f"{self.kernels} kernels ({self.kernels_counted} counted), {self.messages} messages "
            f"({self.messages_counted}), {self.moved_bytes} bytes ({self.moved_bytes_counted})"
        )

    @property
    def agrees(self) -> bool:
        error = abs(self.kernels - self.kernels_counted) / self.kernels_counted
        return error <= LARGEST_ERROR and (
            (self.messages, self.moved_bytes) == (self.messages_counted, self.moved_bytes_counted)
        )


def count(
    P_world: Partition, name: str, grid: tuple[int, ...], text: str
) -> tuple[dict[str, int], int, int]:
    """Return the operations, messages and bytes of this rank's step. Collective over the world."""
    torch.set_num_threads(1)
    network = NETWORKS[name]
    P_x = P_world.create_cartesian_topology_partition(grid)
    assert P_x.index is not None
    block = Decomposition.balanced(network.shape(BATCH), grid).block(P_x.index)
    device = P_world.device
    with as_on_gpu():
        made = network.make().to(device)
        argument = next(iter(signature(made.forward).parameters))
        converted = gpudist.distribute(
            made, P_x, Plan.from_text(text), inputs={argument: "block"}
        )  # fmt: skip
        x = network.block(block.shape).to(device)
        for _ in range(2):
            slopes = [torch.ones_like(y) for y in _learned(converted(x))]
            torch.autograd.backward(_learned(converted(x)), slopes)
        for parameter in converted.parameters():
            parameter.grad = None
        gpudist.stats(reset=True)
        with Counting() as counting:
            torch.autograd.backward(_learned(converted(x)), slopes)
        total = gpudist.stats().total
    operations = {
        name: launches
        for name, (launches, _) in counting.counts().by_name.items()
        if launches and name not in _NOT_COUNTED
    }
    return operations, total.messages, total.sent_bytes


def _learned(outputs: Any) -> list[torch.Tensor]:
    parts = [y.to_local() for y in tree_leaves(outputs) if isinstance(y, GlobalTensor)]
    return [y for y in parts if y.requires_grad]


def compare(pool: RankPool, name: str) -> Rehearsed:
    """Search, rehearse and execute one network."""
    network, profile = NETWORKS[name], profile_of(PROFILE)
    made, x = network.make(), network.block(network.shape(BATCH))
    plan = search(made, x, profile=profile, workers=RANKS)
    assert plan.grid is not None
    dry = dry_network(made, x, profile, True, "adam", False, None)
    rehearsals = [dry.rehearse(plan.grid, rank, plan) for rank in range(RANKS)]
    phases = [phase for one in rehearsals for phase in (one.forward, one.backward)]
    starts_s = sum(phase.terms_s.get("kernel starts", 0.0) for phase in phases)
    found = pool.run(RANKS, count, (name, plan.grid, plan.to_text()), {}, _LIMIT_S, "nccl")
    return Rehearsed(
        name, plan.grid, len(plan.layouts), round(starts_s / (1e-6 * profile.kernel_us)),
        sum(sum(operations.values()) for operations, _, _ in found),
        sum(phase.messages + phase.collectives for phase in phases),
        sum(messages for _, messages, _ in found),
        sum(phase.message_bytes + phase.collective_bytes for phase in phases),
        sum(size_bytes for _, _, size_bytes in found),
        found[0][0],
    )  # fmt: skip


def main() -> int:
    options = _options()
    command = " ".join(["python -m benchmarks.rehearsals", *sys.argv[1:]])
    use_doubles()
    rows: list[Rehearsed] = []
    with RankPool(RANKS, _LIMIT_S) as pool:
        for name in options.network or CHOSEN:
            rows.append(compare(pool, name))
            print(rows[-1], flush=True)
    if options.json:
        lines = [{"environment": environment(command, 1) | {"profile": PROFILE}}]
        text = "".join(f"{json.dumps(line)}\n" for line in (*lines, *map(asdict, rows)))
        options.json.write_text(text, encoding="utf-8")
    return 0 if all(one.agrees for one in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsals", description=__doc__)
    parser.add_argument("--network", action="append", choices=NETWORKS, help="only this one")
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
