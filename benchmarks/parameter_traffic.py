"""Messages and bytes that the networks of the subject ``parameters`` send in one step.

``python -m benchmarks.parameter_traffic --ranks 2`` prints a table in Markdown, with the memory
that a rank holds. Only groups of messages between forward and backward of one step are counted, as
by ``gpudist.stats``; messages and bytes are sums over all ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.layers import block_of
from benchmarks.parameters import NETWORKS, SIDES
from gpudist.testing import run_distributed
from gpudist.transport.flight_recorder import FlightRecorder
from gpudist.world.partition import Partition


@dataclass
class Traffic:
    """Traffic that one rank has sent."""

    groups: int = 0
    messages: int = 0
    nbytes: int = 0


@contextmanager
def counted(P_world: Partition) -> Generator[Traffic]:
    """Count what this rank sends inside the block."""
    traffic, recorder = Traffic(), P_world.wire.recorder
    before = recorder.count, *_sent(recorder)
    try:
        yield traffic
    finally:
        after = recorder.count, *_sent(recorder)
        traffic.groups, traffic.messages, traffic.nbytes = (
            now - then for now, then in zip(after, before, strict=True)
        )


def _sent(recorder: FlightRecorder) -> tuple[int, int]:
    rows = recorder.rows()
    return sum(row.messages for row in rows), sum(row.sent_bytes for row in rows)


def measure(P_world: Partition) -> None:
    """Measure all networks; rank 0 prints the rows."""
    for name, network in NETWORKS.items():
        P_x = P_world.create_cartesian_topology_partition(network.grid(P_world.size))
        x = block_of(torch.rand(network.shape), P_x)
        for side, how in SIDES.items():
            module = network.distributed(P_x, *how)
            module(x).sum().backward()
            with counted(P_world) as forward:
                y = module(x).sum()
            with counted(P_world) as backward:
                y.backward()
            held = sum(parameter.nbytes for parameter in module.parameters())
            rows = P_world.allgather_data([held, *vars(forward).values(), *vars(backward).values()])
            if P_world.rank == 0:
                words = "one owner, fused" if side == "gpudist" else side
                print(_row(name, words, rows), flush=True)


def _row(network: str, side: str, rows: Sequence[Sequence[int]]) -> str:
    held, *_ = zip(*rows, strict=True)
    cells = [network, side]
    for first in (1, 4):
        groups, messages, nbytes = ([row[first + i] for row in rows] for i in range(3))
        cells += [str(max(groups)), str(sum(messages)), f"{sum(nbytes) / 1024:.0f}"]
    cells += [f"{max(held) / 1024:.0f}", f"{min(held) / 1024:.0f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parameter_traffic")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    ranks = parser.parse_args().ranks
    columns = ["network", "placement"]
    columns += [f"{way} {what}" for way in ("forward", "backward") for what in _COUNTED]
    print("| " + " | ".join([*columns, "most KiB held", "least KiB held"]) + " |")
    print("|---|---|" + "---:|" * (len(columns)))
    run_distributed(measure, ranks, transport="host")


_COUNTED = ("groups", "messages", "KiB")

if __name__ == "__main__":
    main()
