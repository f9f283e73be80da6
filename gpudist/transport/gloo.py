"""Gloo transport: CPU ranks on one or several nodes, over torch.distributed's gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed.distributed_c10d as dist

from gpudist.errors import CollectiveTimeout, GpudistError, PeerFailure, TransportError
from gpudist.transport.addresses import LOOPBACK, address_towards, host_of, reachable_address
from gpudist.transport.background import Background, BackgroundCall
from gpudist.transport.base import Signature
from gpudist.transport.failure.deadlines import deadline_text, last_operations, missing_ranks
from gpudist.transport.failure.forks import keep_for_good
from gpudist.transport.failure.store import STORE_ERRORS, StoreFailureChannel, store_failure
from gpudist.transport.host.beacon import Beacon
from gpudist.transport.host.processes import Neighbours
from gpudist.transport.message_header import HEADER_BYTES, MessageHeader
from gpudist.transport.point_to_point import PointToPointTransport
from gpudist.transport.world_facts import WorldFacts

T = TypeVar("T")

_FRAME_BYTES = 4096
_INLINE_BYTES = _FRAME_BYTES - HEADER_BYTES
_FRAME_TAG = 0
# Gloo's deadline is later than ours, so that users see our error.
_GLOO_SLACK_S = 60.0
# Extra time for gloo's wait while connecting; it is short, because gloo's thread outlives our
# deadline.
_CONNECTING_S = 1.0
_SLICE_S = 0.05
_FIRST_LOOK_S = 0.1
_LOOK_EVERY_S = 0.2
_GRACE_S = 0.5
_POLL_S = 0.02


class _ConnectionLost(Exception):
    """Gloo lost its connection to a peer; the rank's own thread determines the cause."""

    def __init__(self, peer: int, error: Exception) -> None:
        super().__init__(str(error))
        self.peer = peer


class _GlooMessage:
    """Message in flight, with the memory it needs until it is complete.

    A frame of fixed size is sent first, because gloo aborts the process if sizes differ. It holds
    the header, and the payload if it fits. A longer payload follows under its own tag once the
    header has been verified.
    """

    def __init__(
        self, payload: torch.Tensor, peer: int, header: MessageHeader, is_recv: bool
    ) -> None:
        self.payload = payload
        self.peer = peer
        self.header = header
        self.is_recv = is_recv
        self.frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        self.is_inline = payload.numel() <= _INLINE_BYTES
        self.inline = self.frame[HEADER_BYTES : HEADER_BYTES + payload.numel()]
        self.tag = 1 + header.sequence % 2**30
        self.works: list[Any] = []

    @property
    def is_complete(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def close_frame(self) -> None:
        """Write the header, and the payload if it fits."""
        packed = bytearray(self.header.pack())
        self.frame[:HEADER_BYTES] = torch.frombuffer(packed, dtype=torch.uint8)
        if self.is_inline:
            self.inline.copy_(self.payload)

    def open_frame(self, rank: int, last_given: str) -> None:
        """Verify the received header, and copy the payload if it is in the frame."""
        received = MessageHeader.unpack(self.frame[:HEADER_BYTES].numpy().tobytes())
        self.header.verify(received, rank, self.peer, last_given)
        if self.is_inline:
            # The mode of the thread that allocated the payload is not that of this one.
            with torch.inference_mode(self.payload.is_inference()):
                self.payload.copy_(self.inline)


class GlooTransport(PointToPointTransport):
    """One rank of a world over gloo.

    The constructor is collective: it returns once all ranks are connected.

    Args:
        store: ``torch.distributed.Store`` for the rendezvous and for failures.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline of every group, in seconds.
        prefix: prefix of the keys in ``store``, unique per world.
        same_node: whether all ranks are on this node, so that messages use the loopback interface.
        interface: network interface to use between nodes; ``None`` for the one towards the store's
            node.
        store_rank: world rank whose process hosts the store, or ``None`` if none of them does.
        look: called in waits; raises the failure of a surrounding world.
    """

    name = "gloo"
    connects = "between nodes without GPUs"

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        prefix: str,
        same_node: bool,
        interface: str | None = None,
        store_rank: int | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._look_outside = look
        self._channel = StoreFailureChannel(store, prefix, store_rank)
        super().__init__(rank, size, torch.device("cpu"), timeout_s, self._channel)
        # Gloo's waits cannot be interrupted, so they run in another thread.
        self._waiter = Background(f"gpudist gloo rank {rank}")
        self._in_flight: set[_GlooMessage] = set()
        self._gloo: Any = None
        self._neighbours = Neighbours({})
        self._patience = timedelta(seconds=timeout_s + _GLOO_SLACK_S)
        operation = self.recorder.begin_group(f"connect {size} ranks")
        self._deadline_s = time.monotonic() + timeout_s
        beacon = Beacon()
        try:
            address_here = LOOPBACK if same_node else address_towards(host_of(store))
            keys = self._await_all(store, f"{prefix}/arrived", f"{address_here} {beacon.text}")
            texts = self._ask(lambda: [store.get(key).decode() for key in keys])
            addresses, _, beacons = zip(*(text.partition(" ") for text in texts), strict=True)
            self._neighbours = Neighbours(dict(enumerate(beacons)))
            address = reachable_address(address_here, addresses)
            # Gloo waits for the others even after this rank has given up, so keep its wait short.
            left_s = max(0.0, self._deadline_s - time.monotonic())
            options = _options(left_s + _CONNECTING_S, address, interface)
            wire = dist.PrefixStore(f"{prefix}/gloo", store)
            job = self._waiter.submit(lambda: dist.ProcessGroupGloo(wire, rank, size, options))
            self._gloo = self._await_connection(job, interface or address)
            self._await(self._channel.connecting)
            # A rank that closes before the others are connected breaks their connections.
            self._await_all(store, f"{prefix}/connected", "")
        except BaseException as error:
            cause = error
            if isinstance(error, STORE_ERRORS):
                cause = self.exception_of(store_failure(store_rank, error))
            try:
                self._fail(cause)
            finally:
                self.close()
            if cause is error:
                raise
            raise cause from error
        finally:
            beacon.close()
        self.recorder.end(operation)

    @classmethod
    def connect(cls, facts: WorldFacts) -> GlooTransport:
        return cls(
            facts.store, facts.rank, facts.size, facts.timeout_s, prefix=facts.prefix,
            same_node=facts.same_node, interface=facts.interface,
            store_rank=facts.store_rank, look=facts.look,
        )  # fmt: skip

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._break()
            if self._failure is None:
                self._channel.leave(self.rank)
            self._neighbours.close()
            # An unfinished connection attempt continues until gloo's deadline.
            has_ended = self._waiter.stop(_GRACE_S if self._gloo is not None else _POLL_S)
            self._channel.close()
            if not has_ended:
                # Freeing these objects would end the wait of a thread, which then needs the
                # interpreter, while that may be shutting down.
                keep_for_good((self._gloo, tuple(self._in_flight)))
            # Close the sockets even if references to this transport remain.
            self._in_flight.clear()
            self._gloo = None

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        keep_for_good(getattr(self, "_gloo", None))

    def _ask(self, call: Callable[[], T]) -> T:
        # A store whose host is stopped never answers.
        return self._await(self._waiter.submit(call))

    def _await_all(self, store: Any, what: str, text: str) -> list[str]:
        """Publish ``text`` and wait until every rank has published its text.

        Unlike gloo's own wait, this one reacts to signals and names the missing ranks.

        Returns:
            Store keys of the texts, by rank.
        """
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self._ask(lambda: store.set(keys[self.rank], text))
        pause_s = 0.001
        while not self._ask(lambda: store.check(keys)):
            if time.monotonic() > self._deadline_s - _SLICE_S:
                there = self._ask(lambda: [store.check([key]) for key in keys])
                missing = [rank for rank, is_there in enumerate(there) if not is_there]
                raise missing_ranks(
                    f"rank {self.rank}", self.timeout_s, missing, self.size,
                    ", with the same world size",
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SLICE_S)
            if pause_s == _SLICE_S:
                self._look()
        return keys

    def _await_connection(self, job: BackgroundCall[Any], address: str) -> Any:
        """Wait for ``job`` and return the process group, listening at ``address``."""
        try:
            return self._await(job)
        except (GpudistError, *STORE_ERRORS):
            raise
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank}, at {address}, is not connected with all others: {error}; if "
                f"this is the wrong network, set GLOO_SOCKET_IFNAME to the interface of the right "
                f"one"
            ) from error

    def _begin(self, signature: Signature) -> None:
        self._deadline_s = time.monotonic() + self.timeout_s

    def _post(
        self, sends: bool, payload: torch.Tensor, peer: int, header: MessageHeader
    ) -> _GlooMessage:
        message = _GlooMessage(payload, peer, header, is_recv=not sends)
        if sends:
            message.close_frame()
        self._in_flight.add(message)
        start = self._gloo.send if sends else self._gloo.recv
        try:
            message.works.append(start([message.frame], peer, _FRAME_TAG))
            if sends and not message.is_inline:
                message.works.append(start([payload], peer, message.tag))
        except RuntimeError as error:
            self._raise_lost(_ConnectionLost(peer, error))
        return message

    def _wait(self, handles: Sequence[_GlooMessage]) -> None:
        if handles:
            self._await(self._waiter.submit(lambda: self._complete(handles)))
            self._in_flight.difference_update(handles)

    def _complete(self, messages: Sequence[_GlooMessage]) -> None:
        """Wait for messages in the background thread: open all frames, then wait for payloads.

        Otherwise two ranks that send each other long payloads would deadlock: a long send ends when
        the peer receives the payload, which it posts only after opening the frame.
        """
        for message in messages:
            if message.is_recv:
                self._wait_work(message.works[0], message.peer)
                message.open_frame(self.rank, self._last_given)
                if not message.is_inline:
                    message.works[0] = self._recv_payload(message)
        for message in messages:
            if not (message.is_recv and message.is_inline):
                for work in message.works:
                    self._wait_work(work, message.peer)

    def _recv_payload(self, message: _GlooMessage) -> Any:
        try:
            return self._gloo.recv([message.payload], message.peer, message.tag)
        except RuntimeError as error:
            raise _ConnectionLost(message.peer, error) from None

    def _wait_work(self, work: Any, peer: int) -> None:
        try:
            work.wait(self._patience)
        except RuntimeError as error:
            raise _ConnectionLost(peer, error) from None

    def _await(self, job: BackgroundCall[T]) -> T:
        """Wait for a job; the deadline, a signal or a failure of the world ends the wait."""
        next_look_s = time.monotonic() + _FIRST_LOOK_S
        while not job.wait(min(_SLICE_S, max(0.0, self._deadline_s - time.monotonic()))):
            now_s = time.monotonic()
            if now_s >= self._deadline_s:
                raise self._timeout()
            if now_s >= next_look_s:
                self._look()
                # What a process sent before it ended may still be on its way.
                if self._dead_without_leaving(self._ranks_waited_for()) and not job.wait(_GRACE_S):
                    self._look()
                    self._raise_dead(self._dead_without_leaving(self._ranks_waited_for()))
                next_look_s = now_s + _LOOK_EVERY_S
        try:
            return job.result()
        except _ConnectionLost as lost:
            self._raise_lost(lost)

    def _look(self) -> None:
        # Raise the failure of this world, if any, and answer a rank that reports a timeout.
        self._look_outside()
        failure = self._channel.peek()
        if self._channel.lines_wanted:
            self._channel.publish_lines(self.rank, self.recorder.lines())
        if failure is not None:
            raise self.exception_of(failure)

    def _raise_lost(self, lost: _ConnectionLost) -> NoReturn:
        # The peer may have closed because of a failure elsewhere: wait for the report of it.
        deadline_s = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline_s:
            self._look()
            time.sleep(_POLL_S)
        # Its death explains more than what it made another rank do.
        self._raise_dead(self._dead_without_leaving(range(self.size)))
        # A store that does not answer takes no report either. If the network is cut, the peer has
        # closed because its own deadline was earlier.
        while self._channel.hangs:
            if time.monotonic() >= self._deadline_s:
                raise self._timeout(lost.peer) from lost
            self._look()
            time.sleep(_POLL_S)
        raise PeerFailure(
            f"rank {lost.peer} closed its connection to rank {self.rank} during '{self._doing()}' "
            "without reporting a cause: its process has probably died; see its own output "
            f"({lost})",
            lost.peer,
        ) from lost

    def _ranks_waited_for(self) -> list[int]:
        if self._gloo is None:
            return list(range(self.size))  # They connect.
        return sorted({message.peer for message in self._in_flight if not message.is_complete})

    def _dead_without_leaving(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in self._neighbours.dead(ranks) if not self._channel.has_left(rank)]

    def _raise_dead(self, ranks: Sequence[int]) -> None:
        if ranks:
            raise PeerFailure(
                f"the process of rank {ranks[0]} has ended while rank {self.rank} was in "
                f"'{self._doing()}'; see its own output",
                ranks[0],
            )

    def _timeout(self, *lost: int) -> CollectiveTimeout:
        mine = self.recorder.lines()
        self._channel.publish_lines(self.rank, mine)
        everyones = self._channel.collect_lines(self.size)
        everyones[self.rank] = mine
        waiting = self._ranks_waited_for() if self._gloo is not None else []
        waiting = sorted({*waiting, *lost})
        cut = (
            "; the store of this world does not answer either: its node is down, or the network "
            "connection is lost"
        )
        return CollectiveTimeout(
            f"{deadline_text(self._doing(), self.rank, self.timeout_s)}, with messages from or to "
            f"ranks {waiting} under way{cut if self._channel.hangs else ''}; "
            + last_operations(everyones, self._neighbours.pids)
        )

    def _doing(self) -> str:
        return self._running.label if self._running is not None else "the connection of all ranks"

    def _break(self) -> None:
        # Gloo closes its connections only when a wait times out. Closing them here ends the
        # background thread's wait and releases the buffers in flight, so that no wait returns
        # during interpreter exit, which would abort the process.
        for message in self._in_flight:
            for work in message.works:
                with suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))


def _options(timeout_s: float, address: str, interface: str | None) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    if interface is not None:
        options._devices = [_device_of(interface)]
    else:
        options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return options


def _device_of(interface: str) -> Any:
    try:
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    except RuntimeError as error:
        raise TransportError(
            f"GLOO_SOCKET_IFNAME is {interface!r}, which is not an interface of this node with an "
            f"address: {error}"
        ) from error
