"""The trace of all ranks: one file, one clock, an arrow for each message."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import gpudist
from gpudist.exchange import start
from gpudist.ops import HaloExchange
from gpudist.profiling.clocks import Reading, align_ns, read_clock
from gpudist.world.partition import Partition
from tests.pool import distributed


def step(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, P_world.size])
    x = torch.ones(2, 4, requires_grad=True)
    gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1))).sum().backward()
    exchange = HaloExchange(P_x, halo=((0, 0), (1, 1)), global_shape=(2, 4 * P_world.size))
    start([exchange.movement(x)], [x.detach()]).wait(0)


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


@distributed(ranks=3)
def test_the_trace_of_all_ranks(P_world: Partition, tmp_path: Path) -> None:
    step(P_world)
    with gpudist.profile(tmp_path / "trace.json", P_world=P_world):
        step(P_world)
    P_world.barrier()
    document = json.loads((tmp_path / "trace.json").read_text())
    events = document["traceEvents"]
    slices = of_phase(events, "X")
    assert {event["pid"] for event in slices} == {0, 1, 2}
    for rank in range(3):
        mine = [event for event in slices if event["pid"] == rank]
        names = [event["name"] for event in mine]
        assert names[:2] == ["halo_exchange [1, 3]", "adjoint of halo_exchange [1, 3]"]
        assert len(names) >= 3
        assert mine[0]["args"]["messages sent"] == (2 if rank == 1 else 1)
        assert mine[0]["args"]["bytes sent"] == 8 * mine[0]["args"]["messages sent"]
        assert mine[0]["args"]["peers"] == ([0, 2] if rank == 1 else [1])
        for event, following in pairwise(mine):
            assert event["ts"] >= 0 and event["ts"] + event["dur"] <= following["ts"] + 0.01
    sent = {event["id"]: event for event in of_phase(events, "s")}
    came = {event["id"]: event for event in of_phase(events, "f")}
    assert len(sent) == len(of_phase(events, "s")) == 12
    if P_world.transport != "nccl":  # where the host does not wait for what is on its way
        assert sent.keys() == came.keys()
    errors_us = document["otherData"]["clock errors, at most, by rank (us)"]
    for name in sent.keys() & came.keys():
        slack_us = sum(errors_us) + 1.0
        if P_world.transport != "nccl":
            assert came[name]["ts"] >= sent[name]["ts"] - slack_us, (name, errors_us)
    assert not P_world.wire.recorder.observers


@distributed(ranks=2, transports=("loopback", "host"))
def test_each_rank_writes_its_part_where_the_block_raises(
    P_world: Partition, tmp_path: Path
) -> None:
    def raising() -> None:
        with gpudist.profile(tmp_path / "trace.json", P_world=P_world):
            step(P_world)
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        raising()
    part = json.loads((tmp_path / f"trace.rank-{P_world.rank}.json").read_text())
    assert {event["pid"] for event in part["traceEvents"]} == {P_world.rank}
    assert len(of_phase(part["traceEvents"], "X")) >= 3
    P_world.barrier()
    assert not (tmp_path / "trace.json").exists()


@distributed(ranks=3, transports=("loopback", "host", "gloo"))
def test_clocks_of_one_machine_agree(P_world: Partition) -> None:
    reading = read_clock(P_world)
    assert (reading.error_ns == 0) == (P_world.rank == 0)
    assert abs(reading.offset_ns) <= reading.error_ns


def test_clocks_that_drift() -> None:
    first, last = Reading(1000, 50, 1), Reading(3000, 70, 1)
    assert align_ns(1000, first, last) == 1050
    assert align_ns(2000, first, last) == 2060
    assert align_ns(4000, first, last) == 4080
    assert align_ns(2000, first, first) == 2050
