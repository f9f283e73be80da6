"""Where the processes of one node tell each other where their shared memory is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from gpudist.errors import CollectiveTimeout, PeerFailure, TransportError
from gpudist.transport.failure.asker import StoreAsker
from gpudist.transport.host.beacon import Beacon, is_beside
from gpudist.transport.host.processes import has_ended

_POLL_S = 0.002
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class NotOneNode(TransportError):
    """Ranks cannot reach one another's memory; raised on all of them alike."""


class _Address(NamedTuple):
    """Of a rank's control block.

    Attributes:
        pid, descriptor: a process, and a descriptor of it.
        numbers: where the process has that number.
        beacon: shows whether it can be seen.
    """

    pid: int
    descriptor: int
    numbers: str
    beacon: str


class HostMeeting:
    """Tells the others where the control block of this rank is, and maps theirs.

    Args:
        store: any ``torch.distributed.Store``.
        prefix: first part of the keys; one per world.
        rank, size: this process in the world.
        timeout_s: for all of it, in seconds.
        store_rank: the rank whose process hosts the store, where it is one of them.
        look: called in waits; raises what has become of a world that this belongs to.
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
        self._told: list[_Address] = []
        self._numbers = _numbers()

    def hold(self, core: Any) -> None:
        """Return when all ranks have mapped one another's control blocks. Collective.

        Args:
            core: the native communicator, which has this rank's.

        Raises:
            CollectiveTimeout: a rank did not come in time.
            PeerFailure: a rank died meanwhile.
            NotOneNode: two ranks cannot reach each other's memory, or one must not share it.
            TransportError: what a rank has left in the store is not what ranks write.
        """
        mapped = [f"{key}/mapped" for key in self._keys]
        with closing(Beacon()) as beacon:
            texts = self._exchange([*core.address(), self._numbers, beacon.text])
            self._told = [_address(text, rank) for rank, text in enumerate(texts)]
            strangers = [r for r, told in enumerate(self._told) if not is_beside(told.beacon)]
            if not strangers:
                self._map(core)
            # Of a rank that ended before it was mapped nobody could say that it had.
            self._ask(lambda: self._store.set(mapped[self._rank], json.dumps(strangers)))
            self._await(mapped)
        for rank, text in enumerate(self._ask(lambda: list(map(self._store.get, mapped)))):
            if others := _ranks(text, rank):
                raise NotOneNode(
                    f"rank {rank} does not see the processes of ranks {others}, which are on "
                    f"another node or in another container; messages between those go over gloo"
                )

    def refuse(self, call: str) -> None:
        """Tell the others that the system forbids ``call`` to this rank. Collective.

        Raises:
            NotOneNode: as all ranks do.
        """
        self._exchange(call)

    def _exchange(self, own: object) -> list[bytes]:
        """What every rank has to say, by rank, unless one must not share its memory."""
        self._ask(lambda: self._store.set(self._keys[self._rank], json.dumps(own)))
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
            core.connect([(told.pid, told.descriptor) for told in self._told])
        except TransportError as error:
            self._require_alive(range(len(self._told)), error)
            for rank, told in enumerate(self._told):
                if str(error).startswith(f"/proc/{told.pid}/") and str(error).endswith(" is gone"):
                    raise self._lost(rank, "gave up") from error
            raise

    def _await(self, keys: Sequence[str]) -> None:
        """Return when all keys are there; ranks whose addresses are known live until then."""
        while not self._ask(lambda: self._store.check(list(keys))):
            there = self._ask(lambda: [self._store.check([key]) for key in keys])
            missing = [rank for rank, is_there in enumerate(there) if not is_there]
            if self._told:
                self._require_alive(missing)
            self._look()
            if time.monotonic() > self._ask.deadline_s:
                raise CollectiveTimeout(
                    f"after {self._timeout_s:g} s rank {self._rank} (process {os.getpid()}) still "
                    f"misses ranks {missing} of {len(keys)}; are they running, on the same node?"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._ask.close()

    def _require_alive(self, ranks: Iterable[int], cause: Exception | None = None) -> None:
        for rank in ranks:
            told = self._told[rank]
            if told.numbers == self._numbers and has_ended(told.pid):
                raise self._lost(rank, "died") from cause

    def _lost(self, rank: int, how: str) -> PeerFailure:
        return PeerFailure(
            f"rank {rank} (process {self._told[rank].pid}) {how} while rank {self._rank} was in "
            f"'connect {len(self._keys)} ranks'",
            rank,
        )


def _numbers() -> str:
    """Processes have the same numbers only within one of these."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _address(text: bytes, rank: int) -> _Address:
    """A process, a descriptor of it and its beacon, as the rank has left them in the store."""
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
    """The ranks that ``rank`` does not see, as it has left them in the store."""
    try:
        ranks = json.loads(text)
        if type(ranks) is list and all(type(other) is int for other in ranks):
            return ranks
    except (ValueError, RecursionError):
        pass
    raise _unreadable(text, f"the ranks apart from rank {rank}")


def _unreadable(text: bytes, what: str) -> TransportError:
    return TransportError(
        f"the store has {text[:80]!r} where {what} should be; run the same gpudist on every rank, "
        f"and let nobody else write there"
    )
