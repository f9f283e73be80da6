"""Four ranks on two hosts: the wire they choose, their results, and the effect of a cut link."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.faults.nodes.hosts import ADDRESSES, Hosts, two_hosts, why_not
from tests.faults.nodes.rank import STEPS, TIMEOUTS_S, images_of
from tests.patience import allowed_s

PORT = "29400"  # in a network of the test's own
LOSS = 0.01
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def torchrun(node: int, *program: object) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    launcher += ["--nproc-per-node", "2", "--node-rank", str(node)]
    launcher += ["--master-addr", ADDRESSES[0], "--master-port", PORT]
    return [*launcher, *map(str, program)]


def wait_for(hosts: Hosts, folder: Path, name: str, timeout_s: float) -> list[Any]:
    """Return what each rank has noted under ``name``, once all have."""
    files = [folder / f"{name}{rank}" for rank in range(4)]
    deadline_s = time.monotonic() + timeout_s
    while missing := [file.name for file in files if not file.exists()]:
        assert time.monotonic() < deadline_s, f"{missing} missing after {timeout_s} s"
        ended = [command.poll() for command in hosts.commands]
        # The last notes of an ended rank may have arrived only now.
        assert None in ended or all(file.exists() for file in files), f"{ended}, but no {missing}"
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """Yield what four ranks found before and after the link between their hosts was cut.

    The two hosts have the same name, the same boot id, and processes with the same numbers.
    """
    folder = tmp_path_factory.mktemp("nodes")
    commands = [torchrun(i, Path(__file__).with_name("rank.py"), folder) for i in range(2)]
    with two_hosts(commands, folder, loss=LOSS) as hosts:
        try:
            found = wait_for(hosts, folder, "found", 120)
            wait_for(hosts, folder, "adding", 60)
            packets = [hosts.link.carried, hosts.link.lost]
            hosts.link.is_cut = True
            errors = wait_for(hosts, folder, "error", 30)
            ended = wait_for(hosts, folder, "ended", 30)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{hosts.end()}") from None
    yield {"found": found, "packets": packets, "errors": errors, "ended": ended}


def test_they_take_gloo(ranks: dict[str, list[Any]]) -> None:
    assert [rank["transport"] for rank in ranks["found"]] == ["gloo"] * 4


def test_hosts_of_one_name_and_boot_id_are_told_apart(ranks: dict[str, list[Any]]) -> None:
    # The processes beside a rank, by the numbers that its own host gives them.
    pids = [rank["pid"] for rank in ranks["found"]]
    assert set(pids[:2]) & set(pids[2:])
    beside = [rank["beside"] for rank in ranks["found"]]
    assert beside == [{str(other): pids[other]} for other in (1, 0, 3, 2)]
    assert [rank["of one node"] for rank in ranks["found"]] == ["gloo"] * 4


def test_lenet_has_the_sequential_losses_though_packets_are_lost(
    ranks: dict[str, list[Any]],
) -> None:
    carried, lost = ranks["packets"]
    assert 0.3 * LOSS < lost / (carried + lost) < 3 * LOSS and lost >= 3
    for rank in ranks["found"]:
        np.testing.assert_allclose(rank["losses"], sequential_losses(), rtol=1e-9, atol=0)


def sequential_losses() -> list[float]:
    """Return the losses of the same network in plain torch."""
    torch.manual_seed(0)
    conv, linear = partial(nn.Conv2d, kernel_size=5), nn.Linear
    network = nn.Sequential(
        conv(1, 6, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        conv(6, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        linear(400, 120), nn.ReLU(), linear(120, 84), nn.ReLU(), linear(84, 10),
    ).double()  # fmt: skip
    losses = []
    for step in range(STEPS):
        images, labels = images_of(step)
        loss = nn.functional.cross_entropy(network(images), labels)
        network.zero_grad()
        loss.backward()
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)
        losses.append(loss.item())
    return losses


def test_a_cut_link_is_reported_within_the_deadline(ranks: dict[str, list[Any]]) -> None:
    for rank, (kind, text, seconds) in enumerate(ranks["errors"]):
        assert kind == "CollectiveTimeout"
        assert seconds < allowed_s(TIMEOUTS_S[rank] + 1)
        assert "'all_sum_reduce over axes [0] of [4]" in text
        assert re.search(r"messages from or to ranks \[[0-3]", text)
        # The store is on the first host, where one of the ranks is first to report.
        assert ("the network connection is lost" in text) == (rank >= 2)
        if rank >= 2:
            assert f"rank {rank}: #" in text and "rank 0: no answer" in text


def test_ranks_behind_a_cut_link_end(ranks: dict[str, list[Any]]) -> None:
    assert ranks["ended"] == [True] * 4


def test_two_hosts_leave_nothing(tmp_path: Path) -> None:
    def devices() -> set[str]:
        return {path.name for path in Path("/sys/class/net").iterdir()}

    before = devices(), socket.gethostname()
    commands = [[sys.executable, "-c", "import time; time.sleep(60)"]] * 2
    with two_hosts(commands, tmp_path) as hosts:
        assert [command.poll() for command in hosts.commands] == [None, None]
    assert all(command.returncode is not None for command in hosts.commands)
    assert before == (devices(), socket.gethostname())
