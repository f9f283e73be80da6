"""Rendezvous of the ranks of an NCCL world, through keys of torch's store."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpudist.checks.digest import digest_of
from gpudist.errors import TransportError
from gpudist.transport.background import Background
from gpudist.transport.failure.deadlines import missing_ranks
from gpudist.transport.host.beacon import Beacon, is_beside

T = TypeVar("T")

_POLL_S = 0.002
_LONGEST_S = 0.05
# The store answers requests of roughly ten thousand ranks per second.
_RANKS_PER_LOOK = 5000
_LOOK_EVERY_S = 0.1
# Time to detect that the store is gone because a peer has died.
_PATIENCE_S = 0.5
_NODE = Path("/proc/sys/kernel/random/boot_id")


class Rendezvous:
    """Rendezvous of one world. Every wait ends when the world fails, even if the store hangs.

    Args:
        store: rendezvous store.
        prefix: prefix of the store keys, unique per world.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline for all ranks to arrive, in seconds.
        look: raises the failure of the world, if there is one.

    Attributes:
        is_seen: whether other processes on this node can find this one.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        size: int,
        timeout_s: float,
        look: Callable[[], None],
    ) -> None:
        self._store: Any = store
        self._prefix = f"{prefix}/nccl"
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._look = look
        self._background = Background(f"gpudist meets {prefix}")
        self._beacon = Beacon()
        self.is_seen = self._beacon.is_lit

    def arrive(self) -> dict[int, int]:
        """Wait for all ranks and return the process ids of the others on this node, by rank.

        Raises:
            CollectiveTimeout: ranks are missing at the deadline; names them.
        """
        boot = _NODE.read_text().strip() if _NODE.exists() else ""
        node = f"{self._prefix}/on/{socket.gethostname()}/{boot}"
        arrived = f"{self._prefix}/arrived"
        self.ask(lambda: self._store.append(node, f"{self._rank} {self._beacon.text},"))
        self.ask(lambda: self._store.set(f"{self._prefix}/here/{self._rank}", ""))
        self.ask(lambda: self._store.add(arrived, 1))
        deadline_s = time.monotonic() + self._timeout_s
        pause_s, longest_s = _POLL_S, max(_LONGEST_S, self._size / _RANKS_PER_LOOK)
        while self.ask(lambda: self._store.add(arrived, 0)) < self._size:
            if time.monotonic() > deadline_s:
                raise missing_ranks(
                    f"rank {self._rank} (process {os.getpid()})", self._timeout_s, self._missing(),
                    self._size, ", with the same world size",
                )  # fmt: skip
            self._pause(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        here = self.ask(lambda: self._store.get(node))
        try:
            entries = [entry.split(" ", 1) for entry in here.decode().split(",") if entry]
            processes = {int(rank): (int(text.split()[0]), text) for rank, text in entries}
        except (ValueError, IndexError) as error:
            raise self._unreadable(here) from error
        del processes[self._rank]
        return {rank: pid for rank, (pid, text) in processes.items() if is_beside(text)}

    def share_id(self, members: Sequence[int], make_id: Callable[[], bytes]) -> bytes:
        """Return the unique id of a communicator, created by the first of its ``members``.

        Waits for the id until the world fails; the caller enforces the deadline.
        """
        key = f"{self._prefix}/id/{digest_of(','.join(map(str, members)).encode()).hex()}"
        if self._rank == members[0]:
            made = make_id()
            self.ask(lambda: self._store.set(key, made.hex()))
            return made
        while not self.ask(lambda: self._store.check([key])):
            self._pause()
        text = self.ask(lambda: self._store.get(key))
        try:
            return bytes.fromhex(text.decode())
        except ValueError as error:
            raise self._unreadable(text) from error

    def ask(self, call: Callable[[], T]) -> T:
        """Run a request to the store in another thread and return its result."""
        job = self._background.submit(call)
        while not job.wait(_LOOK_EVERY_S):
            self._look()
        try:
            return job.result()
        except (RuntimeError, OSError) as error:
            deadline_s = time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline_s:
                self._pause()
            raise TransportError(
                f"rank {self._rank} cannot reach the store of this world: {error}"
            ) from error

    def close(self) -> None:
        self._beacon.close()
        self._background.stop()
        self._store = None

    def _missing(self) -> list[int]:
        return [
            rank
            for rank in range(self._size)
            if not self.ask(lambda rank=rank: self._store.check([f"{self._prefix}/here/{rank}"]))
        ]

    def _unreadable(self, text: bytes) -> TransportError:
        return TransportError(
            f"rank {self._rank} found {text[:80]!r} in the store of this world, which is not "
            "written by any rank; run the same gpudist on every rank, and let no other program "
            "write to the store"
        )

    def _pause(self, seconds: float = _POLL_S) -> None:
        self._look()
        time.sleep(seconds)
