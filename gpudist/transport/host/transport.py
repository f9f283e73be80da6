"""Host transport: shared memory between the processes of one node, without GPUs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import torch.distributed as dist

from gpudist.transport.failure.store import STORE_ERRORS, store_failure
from gpudist.transport.host.core_transport import CoreTransport, require_core
from gpudist.transport.host.meeting import HostMeeting
from gpudist.transport.host.processes import forbidden_call
from gpudist.transport.world_facts import WorldFacts


class HostTransport(CoreTransport):
    """One rank of a world of processes on one node.

    The constructor is collective: it returns once every rank has mapped the control blocks of all
    others. Memory for messages is allocated when two ranks first communicate. The memory has no
    name in the file system, and is freed when the processes end.

    Args:
        store: rendezvous store, not used afterwards.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline of every group, in seconds.
        prefix: prefix of the keys in ``store``, unique per world.
        store_rank: world rank whose process hosts the store, or ``None`` if none of them does.
        look: called during the rendezvous; raises the failure of a surrounding world.

    Raises:
        NotBuiltError: this installation has no native core.
        CollectiveTimeout: a rank did not arrive in time.
        PeerFailure: a rank died meanwhile.
        TransportError: an entry in the store is unreadable, or is not a segment of this user.
        NotOneNode: on every rank, if two ranks cannot access each other's memory, or the system
            forbids a rank to share its memory.
    """

    name = "host"
    connects = "between processes of one node"

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        prefix: str,
        store_rank: int | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        require_core(self.name)
        meeting = HostMeeting(store, prefix, rank, size, timeout_s, store_rank, look)
        if call := forbidden_call():
            with closing(meeting):
                meeting.refuse(call)
        super().__init__(rank, size, timeout_s)
        operation = self.recorder.begin_group(f"connect {size} ranks")
        try:
            with closing(meeting):
                meeting.hold(self._core)
        except BaseException as error:
            self.close()
            if isinstance(error, STORE_ERRORS):
                raise self.exception_of(store_failure(store_rank, error)) from error
            raise
        self.recorder.end(operation)

    @classmethod
    def connect(cls, facts: WorldFacts) -> HostTransport:
        return cls(
            facts.store, facts.rank, facts.size, facts.timeout_s,
            prefix=facts.prefix, store_rank=facts.store_rank, look=facts.look,
        )  # fmt: skip
