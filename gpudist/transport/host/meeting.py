"""Rendezvous of the processes of one node, which exchange the addresses of their shared memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from gpudist.errors import PeerFailure, TransportError
from gpudist.transport.failure.asker import StoreAsker
from gpudist.transport.failure.deadlines import missing_ranks
from gpudist.transport.host.beacon import Beacon, is_beside
from gpudist.transport.host.processes import has_ended

_POLL_S = 0.002
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class NotOneNode(TransportError):
    """Ranks cannot access each other's memory; raised on all ranks alike."""


class _Address(NamedTuple):
    """Address of a rank's control block.

    Attributes:
        pid, descriptor: process id, and file descriptor in this process.
        numbers: identifier of the process id namespace.
        beacon: beacon text, which shows whether the process is visible.
    """

    pid: int
    descriptor: int
    numbers: str
    beacon: str


class HostMeeting:
    """Exchange of control block addresses, after which each rank maps those of the others.

    Args:
        store: any ``torch.distributed.Store``.
        prefix: prefix of the store keys, unique per world.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline of the whole rendezvous, in seconds.
        store_rank: rank whose process hosts the store, or ``None`` if none of them does.
        look: called in waits; raises the failure of a surrounding world.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        size: int,
        timeout_s: float,
        store_rank: int | None,
        look: Callable[[], None],
    ) -> None:
        self._store = store
        self._look = look
        self._ask = StoreAsker(f"connect {size} ranks", rank, timeout_s, store_rank)
        self._rank = rank
        self._timeout_s = timeout_s
        self._keys = [f"{prefix}/host/{rank}" for rank in range(size)]
        self._addresses: list[_Address] = []
        self._numbers = _numbers()

    def hold(self, core: Any) -> None:
        """Map the control blocks of all ranks, and wait until all ranks have done so. Collective.

        Args:
            core: native communicator with this rank's control block.

        Raises:
            CollectiveTimeout: a rank did not arrive in time.
            PeerFailure: a rank died meanwhile.
            NotOneNode: two ranks cannot access each other's memory, or the system forbids a rank
                to share its memory.
            TransportError: the store has an unreadable entry.
        """
        mapped = [f"{key}/mapped" for key in self._keys]
        with closing(Beacon()) as beacon:
            texts = self._exchange([*core.address(), self._numbers, beacon.text])
            self._addresses = [_address(text, rank) for rank, text in enumerate(texts)]
            strangers = [
                r for r, address in enumerate(self._addresses) if not is_beside(address.beacon)
            ]
            if not strangers:
                self._map(core)
            # The death of a rank can only be detected once it is mapped, so wait for all.
            self._ask(lambda: self._store.set(mapped[self._rank], json.dumps(strangers)))
            self._await(mapped)
        for rank, text in enumerate(self._ask(lambda: list(map(self._store.get, mapped)))):
            if others := _ranks(text, rank):
                raise NotOneNode(
                    f"rank {rank} does not see the processes of ranks {others}, which are on "
                    f"another node or in another container; messages between them need gloo"
                )

    def refuse(self, call: str) -> None:
        """Report to all ranks that the system forbids this rank to use ``call``. Collective.

        Raises:
            NotOneNode: always, on all ranks.
        """
        self._exchange(call)

    def _exchange(self, entry: object) -> list[bytes]:
        """Publish ``entry`` and return the texts of all ranks, unless one has called ``refuse``."""
        self._ask(lambda: self._store.set(self._keys[self._rank], json.dumps(entry)))
        self._await(self._keys)
        texts = self._ask(lambda: list(map(self._store.get, self._keys)))
        for rank, text in enumerate(texts):
            if text.startswith(b'"'):
                raise NotOneNode(
                    f"the system forbids rank {rank} the call {text.decode(errors='replace'):.80}, "
                    "which shared memory between processes needs (in a container, its seccomp "
                    "profile does): allow it, or set GPUDIST_TRANSPORT=gloo on all ranks"
                )
        return texts

    def _map(self, core: Any) -> None:
        try:
            core.connect([(address.pid, address.descriptor) for address in self._addresses])
        except TransportError as error:
            self._require_alive(range(len(self._addresses)), error)
            for rank, address in enumerate(self._addresses):
                text = str(error)
                if text.startswith(f"/proc/{address.pid}/") and text.endswith(" is gone"):
                    raise self._lost(rank, "gave up") from error
            raise

    def _await(self, keys: Sequence[str]) -> None:
        """Wait for all keys; raise if a rank with a known address dies meanwhile."""
        while not self._ask(lambda: self._store.check(list(keys))):
            there = self._ask(lambda: [self._store.check([key]) for key in keys])
            missing = [rank for rank, is_there in enumerate(there) if not is_there]
            if self._addresses:
                self._require_alive(missing)
            self._look()
            if time.monotonic() > self._ask.deadline_s:
                raise missing_ranks(
                    f"rank {self._rank} (process {os.getpid()})", self._timeout_s, missing,
                    len(keys), " on the same node",
                )  # fmt: skip
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._ask.close()

    def _require_alive(self, ranks: Iterable[int], cause: Exception | None = None) -> None:
        for rank in ranks:
            address = self._addresses[rank]
            if address.numbers == self._numbers and has_ended(address.pid):
                raise self._lost(rank, "died") from cause

    def _lost(self, rank: int, how: str) -> PeerFailure:
        return PeerFailure(
            f"rank {rank} (process {self._addresses[rank].pid}) {how} while rank {self._rank} was "
            f"in 'connect {len(self._keys)} ranks'",
            rank,
        )


def _numbers() -> str:
    # Process ids are comparable only within one boot and one pid namespace.
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _address(text: bytes, rank: int) -> _Address:
    """Parse the address that ``rank`` has published."""
    try:
        pid, descriptor, numbers, beacon = json.loads(text)
        are_numbers = type(pid) is type(descriptor) is int
        are_texts = type(numbers) is type(beacon) is str
        if are_numbers and are_texts and 0 < pid < 2**31 and 0 <= descriptor < 2**31:
            return _Address(pid, descriptor, numbers, beacon)
    except (ValueError, TypeError, RecursionError):
        pass
    raise _unreadable(text, f"the address of rank {rank}")


def _ranks(text: bytes, rank: int) -> list[int]:
    """Parse the list of ranks that ``rank`` does not see."""
    try:
        ranks = json.loads(text)
        if type(ranks) is list and all(type(other) is int for other in ranks):
            return ranks
    except (ValueError, RecursionError):
        pass
    raise _unreadable(text, f"the ranks apart from rank {rank}")


def _unreadable(text: bytes, what: str) -> TransportError:
    return TransportError(
        f"the store has {text[:80]!r} instead of {what}; run the same gpudist on every rank, and "
        "let no other program write to the store"
    )
