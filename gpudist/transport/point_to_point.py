"""Base class of transports that only send messages between two ranks.

Groups and collectives are built on abstract methods for messages, so that a transport is one small
file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

import torch

from gpudist import errors
from gpudist.transport.base import Signature, Transport
from gpudist.transport.collectives import PointToPointCommunicator
from gpudist.transport.failure.channel import Failure, FailureChannel
from gpudist.transport.failure.forks import words_of_child
from gpudist.transport.flight_recorder import post_of
from gpudist.transport.message_header import MessageHeader

# An odd number, so that the order of what is folded counts.
_FACTOR = 0x9E3779B97F4A7C15


class PointToPointTransport(Transport):
    """Groups and collectives over point-to-point messages.

    Messages from one rank to another match in posting order, as in NCCL: there are no tags.

    When a group ends, its sends and receives are posted in the order of the calls. Then its
    collectives run one after the other, in ascending order of their member lists (those of one
    communicator in the order of the calls). Then the transport waits for the sends and receives.
    All ranks run their collectives in the same total order, so the first unfinished one never waits
    for a later one: crossing groups, in which each of two ranks is the root of one and a member of
    the other, cannot deadlock. Neither can sends and receives, which are in flight before any rank
    waits.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, timeout_s: float, failures: FailureChannel
    ) -> None:
        super().__init__(rank, size, device, timeout_s, failures)
        self._running: Signature | None = None
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._given: Counter[int] = Counter()
        self._last_given = "no call of this rank"
        self._failure: Failure | None = None
        self._closed = False

    # Start the deadline of a group.
    def _begin(self, signature: Signature) -> None:
        pass

    # Start to send a one-dimensional uint8 tensor to a world rank, or to receive one, and return a
    # handle. The wait of a receive must verify the expected header.
    @abstractmethod
    def _post(
        self, sends: bool, payload: torch.Tensor, peer: int, header: MessageHeader
    ) -> Any: ...

    # Wait until all are complete; raise at the deadline or if the world fails.
    @abstractmethod
    def _wait(self, handles: Sequence[Any]) -> None: ...

    def _break(self) -> None:
        # Release the messages in flight after a failure; must not block.
        pass

    def fold(self, peers: Sequence[int], number: int, what: str) -> None:
        for peer in peers:
            self._given[peer] = ((self._given[peer] ^ number) * _FACTOR) % 2**64
        self._last_given = what

    @property
    def in_group(self) -> bool:
        return self._open is not None

    def queue_message(self, sends: bool, payload: torch.Tensor, peer: int) -> None:
        """Send one-dimensional uint8 memory to a world rank, or receive it, when the group ends."""
        self.queue((), partial(self._start, sends, payload, peer))

    def queue(self, members: tuple[int, ...], run: Callable[[], Any]) -> None:
        """Call ``run`` when the group ends: a collective of ``members``, or the start of a message.

        Messages have no members, and ``run`` returns their handle.
        """
        if self._open is None:
            raise errors.TransportError("messages are posted inside `with transport.group(...):`")
        self._open[1].append((members, run))

    def exchange(
        self,
        sends: Iterable[tuple[torch.Tensor, int]] = (),
        recvs: Iterable[tuple[torch.Tensor, int]] = (),
    ) -> None:
        """Exchange one step of a collective: pairs of payload and world rank, concurrently."""
        handles = [self._start(False, payload, peer) for payload, peer in recvs]
        handles += [self._start(True, payload, peer) for payload, peer in sends]
        self._wait(handles)

    def abort(self, failure: Failure) -> None:
        if self._failure is None:
            self.failures.post(failure)
            # Another rank may have posted earlier; all ranks raise the first cause.
            self._failure = self.failures.peek() or failure
            self.report_failure(self._failure)
            self._break()

    def post_failure(self, failure: Failure) -> None:
        super().post_failure(failure)
        # A rank that never waits for long does not check the channel.
        self._failure = self._failure or self.failures.peek() or failure

    def error(self) -> errors.GpudistError | None:
        if self._failure is not None:
            return self.exception_of(self._failure)
        if self._closed:
            return errors.TransportError(
                f"the {self.name} transport of rank {self.rank} was closed"
            )
        return None

    def leave_to_parent(self) -> None:
        if self.size > 1 and not self._closed:
            self._closed = True
            text = words_of_child(self.name, self.rank)
            self._failure = Failure("TransportError", self.rank, text)

    def close(self) -> None:
        self._closed = True

    def _make_communicator(self, members: tuple[int, ...]) -> PointToPointCommunicator:
        return PointToPointCommunicator(self, members)

    def _run_group(self, signature: Signature, posts: list[Any]) -> None:
        self._running = signature
        try:
            self._begin(signature)
            # Messages, which have no members, come first.
            handles = [run() for _, run in sorted(posts, key=itemgetter(0))]
            self._wait([handle for handle in handles if handle is not None])
        except BaseException as error:
            self.end_with(error)
        finally:
            self._running = None

    def end_with(self, error: BaseException) -> NoReturn:
        self._fail(error)
        raise error

    def _fail(self, error: BaseException) -> None:
        # Post ``error``; if the world failed for another reason first, raise that instead.
        if self._is_reported and isinstance(error, errors.GpudistError):
            self.check()
        mine = Failure.from_exception(error, self.rank)
        self.abort(mine)
        first = self._failure or mine
        is_mine = first.kind == mine.kind and mine.message.startswith(first.message)
        if isinstance(error, errors.GpudistError) and not is_mine:
            raise self.exception_of(first) from error

    def _start(self, sends: bool, payload: torch.Tensor, peer: int) -> Any:
        assert self._running is not None
        sequence, size_bytes = self._next_number(sends, peer), payload.numel()
        self.recorder.record_post(post_of(sends, peer, size_bytes), sequence)
        header = MessageHeader.of(self._running, sequence, size_bytes, self._given[peer])
        return self._post(sends, payload, peer, header)

    def _next_number(self, sends: bool, peer: int) -> int:
        counted = self._sent if sends else self._received
        counted[peer] += 1
        return counted[peer] - 1
