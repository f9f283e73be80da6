"""Four ranks on two hosts: which wire they take, what they compute, and what a cut link does."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nodes.hosts import ADDRESSES, two_hosts, why_not
from tests.nodes.ranks_apart import TIMEOUT_S

PORT = "29400"  # in a network of the test's own
HERE = Path(__file__).parent
STEPS = ("seen", "adding", "error")
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def torchrun(node: int, *program: object) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    launcher += ["--nproc-per-node", "2", "--node-rank", str(node)]
    launcher += ["--master-addr", ADDRESSES[0], "--master-port", PORT]
    return [*launcher, *map(str, program)]


@pytest.mark.parametrize("loss", [0.01])
def test_lenet_over_a_link_that_loses_packets(tmp_path: Path, loss: float) -> None:
    pytest.importorskip("rich", reason="the example prints with rich")
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    file = tmp_path / "results.json"
    options = ["--data", "digits", "--dtype", "float64", "--steps", "3", "--compare"]
    commands = [torchrun(i, "examples/lenet5.py", *options, "--json", file) for i in range(2)]
    with two_hosts(commands, tmp_path, loss=loss) as hosts:
        for status, output in hosts.wait(120):
            assert status == 0, output
        assert hosts.link.lost > 0.5 * loss * hosts.link.carried > 10
    record = json.loads(file.read_text())
    assert (record["transport"], record["ranks"]) == ("gloo", 4)
    np.testing.assert_allclose(record["loss"], record["sequential_loss"], rtol=1e-9, atol=0)
    assert record["accuracy"] == record["sequential_accuracy"]


def wait_for(files: list[Path], timeout_s: float) -> list[Any]:
    """What ranks have noted in ``files``, when all have."""
    deadline_s = time.monotonic() + timeout_s
    while missing := [file.name for file in files if not file.exists()]:
        assert time.monotonic() < deadline_s, f"after {timeout_s} s there is no {missing}"
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """What four ranks found that were told they are on one node; the link is cut below them.

    The two hosts have one name, one boot id, and processes of the same numbers.
    """
    folder = tmp_path_factory.mktemp("nodes")

    def command(*numbers: int) -> list[str]:
        program = f"{sys.executable} {HERE / 'ranks_apart.py'} {folder}"
        started = [f"RANK={rank} LOCAL_RANK={rank} {program} &" for rank in numbers]
        return ["sh", "-c", " ".join([*started, "wait"])]

    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    environment |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
    commands = [command(0, 1), command(2, 3)]
    with two_hosts(commands, folder, environment=environment) as hosts:
        names = {name: [folder / f"{name}{rank}" for rank in range(4)] for name in STEPS}
        seen = wait_for(names["seen"], 60)
        wait_for(names["adding"], 30)
        hosts.link.is_cut = True
        cut_s = time.monotonic()
        errors = wait_for(names["error"], 20)
        seconds = time.monotonic() - cut_s
        statuses = [status for status, _ in hosts.wait(20)]
    yield {"seen": seen, "errors": errors, "seconds": [seconds], "statuses": statuses}


def test_hosts_of_one_name_and_boot_id_are_told_apart(ranks: dict[str, list[Any]]) -> None:
    seen = ranks["seen"]
    assert [rank["transport"] for rank in seen] == ["gloo"] * 4
    # The processes beside a rank, by the numbers that its own host gives them.
    pids = [rank["pid"] for rank in seen]
    assert set(pids[:2]) & set(pids[2:])
    assert [rank["beside"] for rank in seen] == [
        {str(other): pids[other]} for other in (1, 0, 3, 2)
    ]
    refusals = {rank["refusal"] for rank in seen}
    assert len(refusals) == 1
    assert "rank 0 does not see the processes of ranks [2, 3]" in refusals.pop()


def test_a_cut_link_is_reported_within_the_deadline(ranks: dict[str, list[Any]]) -> None:
    for rank, (kind, text, seconds) in enumerate(ranks["errors"]):
        assert kind == "CollectiveTimeout"
        assert seconds < TIMEOUT_S + 1
        assert "'all_sum_reduce over axes [0] of [4]" in text
        assert f"rank {rank}: #" in text
        # The store is on the first host.
        assert ("the network between is cut" in text) == (rank >= 2)
    assert ranks["seconds"][0] < TIMEOUT_S + 2
    assert ranks["statuses"] == [0, 0]


def test_two_hosts_leave_nothing(tmp_path: Path) -> None:
    before = {path.name for path in Path("/sys/class/net").iterdir()}, socket.gethostname()
    commands = [[sys.executable, "-c", "import time; time.sleep(60)"]] * 2
    with two_hosts(commands, tmp_path) as hosts:
        assert [command.poll() for command in hosts.commands] == [None, None]
    assert all(command.returncode is not None for command in hosts.commands)
    assert before == (
        {path.name for path in Path("/sys/class/net").iterdir()},
        socket.gethostname(),
    )
