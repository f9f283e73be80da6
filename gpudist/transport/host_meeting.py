"""Where the processes of one node tell each other where their shared memory is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch.distributed as dist

from gpudist.errors import CollectiveTimeout, TransportError
from gpudist.transport.beacon import Beacon, is_beside

_POLL_S = 0.002


class NotOneNode(TransportError):
    """Ranks cannot reach one another's memory; raised on all of them alike."""


def meet(core: Any, store: dist.Store, prefix: str, rank: int, size: int, timeout_s: float) -> None:
    """Tell the others where the control block of ``core`` is, and map theirs. Collective.

    Raises:
        CollectiveTimeout: a rank did not come in time.
        NotOneNode: two ranks cannot reach each other's memory.
        TransportError: what a rank has left in the store is not what ranks write.
    """
    deadline_s = time.monotonic() + timeout_s
    keys = [f"{prefix}/host/{rank}" for rank in range(size)]
    with closing(Beacon()) as beacon:
        store.set(keys[rank], json.dumps([*core.address(), beacon.text]))
        _await_keys(store, keys, rank, timeout_s, deadline_s)
        told = [_address(store.get(key), of) for of, key in enumerate(keys)]
        strangers = [of for of, (*_, text) in enumerate(told) if not is_beside(text)]
        if not strangers:
            core.connect([(pid, descriptor) for pid, descriptor, _ in told])
        # Of a rank that ended before it was mapped nobody could say that it had.
        mapped = [f"{key}/mapped" for key in keys]
        store.set(mapped[rank], json.dumps(strangers))
        _await_keys(store, mapped, rank, timeout_s, deadline_s)
    for of, key in enumerate(mapped):
        if others := _ranks(store.get(key), of):
            raise NotOneNode(
                f"rank {of} does not see the processes of ranks {others}, which are on another "
                f"node or in another container; messages between those go over gloo"
            )


def _await_keys(
    store: dist.Store, keys: Sequence[str], rank: int, timeout_s: float, deadline_s: float
) -> None:
    while not store.check(list(keys)):
        if time.monotonic() > deadline_s:
            missing = [of for of, key in enumerate(keys) if not store.check([key])]
            raise CollectiveTimeout(
                f"after {timeout_s:g} s rank {rank} (process {os.getpid()}) still misses ranks "
                f"{missing} of {len(keys)}; are they running, on the same node?"
            )
        time.sleep(_POLL_S)


def _address(text: bytes, rank: int) -> tuple[int, int, str]:
    """A process, a descriptor of it and its beacon, as the rank has left them in the store."""
    try:
        pid, descriptor, beacon = json.loads(text)
        are_numbers = type(pid) is type(descriptor) is int
        if are_numbers and 0 < pid < 2**31 and 0 <= descriptor < 2**31 and type(beacon) is str:
            return pid, descriptor, beacon
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
