"""Kill ranks that talk through shared memory: survivors name the dead one, and nothing is left.

``python -m tests.native.chaos --kills 50``
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpudist import broadcast, halo_exchange
from gpudist.partition import Partition
from gpudist.runtime import connect, world_of

RANKS = 4
NOTICE_S = 2.0
_ANSWER_S = 20.0


class Ranks:
    """Plain processes, each one rank of one world over shared memory; the first serves the store.

    Args:
        size: number of ranks.
        body: called with ``(P_world, *args)`` on each, at the top level of a module.
        timeout_s: deadline of every wait between ranks.
    """

    def __init__(
        self, size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        preload = ["torch", "torch.distributed", "gpudist", "gpudist.checkpoint", __name__]
        context.set_forkserver_preload(preload)
        self.ends: list[Connection] = []
        self.processes = []
        port = 0
        for rank in range(size):
            end, far_end = context.Pipe()
            process = context.Process(
                target=_play, args=(far_end, rank, size, port, timeout_s, body, args), daemon=True
            )
            process.start()
            far_end.close()
            if rank == 0:
                port = end.recv()
            self.ends.append(end)
            self.processes.append(process)
        for end in self.ends:
            assert end.recv() == "ready"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal; when, in seconds of the monotonic clock."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        return time.monotonic()

    def answers(self) -> dict[int, Answer]:
        """What the ranks that answer say."""
        found: dict[int, Answer] = {}
        rank_of = {end: rank for rank, end in enumerate(self.ends)}
        deadline_s = time.monotonic() + _ANSWER_S
        while rank_of and time.monotonic() < deadline_s:
            for end in wait(list(rank_of), timeout=max(0.0, deadline_s - time.monotonic())):
                rank = rank_of.pop(end)  # type: ignore[arg-type]
                with contextlib.suppress(EOFError, ConnectionResetError):
                    found[rank] = end.recv()  # type: ignore[union-attr]
        return found


@dataclass
class Answer:
    """How a rank's body ended, when, and what its process holds after the transport closed."""

    value: Any
    error: BaseException | None
    end_s: float
    leftovers: list[str]


def _play(
    end: Connection,
    rank: int,
    size: int,
    port: int,
    timeout_s: float,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        end.send(store.port)
    before = _descriptors()
    wire = connect("host", store, rank, size, timeout_s, "chaos")
    end.send("ready")
    value = error = None
    try:
        value = body(world_of(wire), *args)
    except BaseException as raised:
        error = raised.with_traceback(None)
    end_s = time.monotonic()
    wire.close()
    after = _descriptors()
    leftovers = list((Counter(after) - Counter(before)).elements())
    end.send(Answer(value, error, end_s, leftovers + _of_gpudist(os.getpid())))
    try:
        end.recv()
    except EOFError:
        return


def _descriptors() -> list[str]:
    """What this process has open; the sockets are the store's."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # that of the listing itself
    return [text for text in found if not text.startswith("socket:")]


def _of_gpudist(pid: int) -> list[str]:
    """Descriptors and mappings of gpudist's segments in a process."""
    found: list[str] = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.append(os.readlink(link))
            except OSError:
                continue
        found += Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    return [text for text in found if "memfd:gpudist" in text]


def talk(P_world: Partition, seed: int) -> None:
    """Random exchanges for ever; the same on every rank."""
    rng = random.Random(seed)
    P_line = P_world.create_cartesian_topology_partition([P_world.size])
    P_square = P_world.create_cartesian_topology_partition([2, P_world.size // 2])
    roots = [P_world.create_partition_inclusive([rank]) for rank in range(P_world.size)]
    x = torch.arange(100_000.0)
    while True:
        kind = rng.randrange(3)
        cells = rng.choice([3, 1000, 100_000])
        if kind == 0:
            halo, extents = [(2, rng.randint(0, 2))], [P_world.size * cells]
            halo_exchange(x[:cells], P_line, halo=halo, periodic=True, global_shape=extents)
        elif kind == 1:
            block = x[:cells].view(-1, 1).expand(-1, 3)
            halo, nested = [(1, 1), (1, 1)], rng.random() < 0.5
            extents = [2 * cells, 3 * (P_world.size // 2)]
            halo_exchange(block, P_square, halo=halo, nested=nested, global_shape=extents)
        else:
            P_root = roots[rng.randrange(P_world.size)]
            block = x[:cells] if P_root.active else x[:0]
            broadcast(block, P_root, P_world, global_shape=[cells])


def kill_one(seed: int, victim: int | None = None) -> tuple[int, float]:
    """Kill a rank of a new world at a random moment; who, and after how long the last one knew.

    Raises:
        AssertionError: a survivor did not name the dead rank in time, or something was left behind.
    """
    rng = random.Random(seed)
    victim = rng.randrange(RANKS) if victim is None else victim
    shared = set(os.listdir("/dev/shm"))
    with Ranks(RANKS, talk, seed) as ranks:
        time.sleep(rng.uniform(0.0, 0.3))
        killed_s = ranks.kill(victim)
        answers = ranks.answers()
        assert sorted(answers) == [rank for rank in range(RANKS) if rank != victim], answers
        for rank, answer in answers.items():
            where = f"seed {seed}, rank {rank} after the death of {victim}"
            assert type(answer.error).__name__ == "PeerFailure", f"{where}: {answer}"
            assert getattr(answer.error, "rank", None) == victim, f"{where}: {answer.error}"
            died = rf"rank {victim} \(process {ranks.processes[victim].pid}\) died"
            assert re.search(died, str(answer.error)), f"{where}: {answer.error}"
            assert answer.end_s - killed_s < NOTICE_S, f"{where}: {answer.end_s - killed_s:.2f} s"
            assert not answer.leftovers, f"{where}: {answer.leftovers}"
        pids = [process.pid for process in ranks.processes]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "gpudist" in name}
    return victim, max(answer.end_s for answer in answers.values()) - killed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    slowest_s = 0.0
    victims = [0] * RANKS
    # Rank 0 holds the failure board and serves the store; it comes first.
    for number in range(options.kills):
        victim, after_s = kill_one(options.seed * 1000 + number, 0 if number == 0 else None)
        victims[victim] += 1
        slowest_s = max(slowest_s, after_s)
    print(
        f"{options.kills} kills (of each rank: {victims}): every survivor named the dead rank, the "
        f"slowest after {slowest_s:.2f} s; no process, descriptor, mapping or /dev/shm entry left"
    )


if __name__ == "__main__":
    main()
