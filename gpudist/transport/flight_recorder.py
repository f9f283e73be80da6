"""Flight recorder: the last operations of a rank, and totals per operator."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import prod
from time import monotonic
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import torch

from gpudist.cache import Cache
from gpudist.geometry.boxes import Stage
from gpudist.geometry.messages import MessageStage
from gpudist.transport.labels import operator_and_partition

Phase = Literal["run", "start", "wait"]

_KEPT = 64


class Post(NamedTuple):
    """This rank's side of a message or of a collective of the transport.

    Attributes:
        kind: ``"send"``, ``"receive"`` or the name of the collective.
        peer: world rank of the other side, or of the root.
        sent_bytes, received_bytes: bytes that this rank sends and receives.
    """

    kind: str
    peer: int
    sent_bytes: int
    received_bytes: int


def post_of(sends: bool, peer: int, size_bytes: int) -> Post:
    """Return this rank's side of a message."""
    return Post("send", peer, size_bytes, 0) if sends else Post("receive", peer, 0, size_bytes)


class OperatorTotals:
    """Totals of one operator over one partition on this rank.

    Attributes:
        operator, partition: names of the operator and the partition.
        calls: number of complete calls.
        messages: number of messages sent; a collective of the transport counts as one.
        sent_bytes, received_bytes: bytes of data in messages, without headers.
        seconds: host time inside the calls; zero over a transport that does not wait.
    """

    __slots__ = (
        "calls", "messages", "operator", "partition", "received_bytes", "seconds", "sent_bytes",
    )  # fmt: skip

    def __init__(self, operator: str, partition: str) -> None:
        self.operator = operator
        self.partition = partition
        self.clear()

    def clear(self) -> None:
        self.calls = self.messages = self.sent_bytes = self.received_bytes = 0
        self.seconds = 0.0

    def add(self, post: Post, times: int = 1) -> None:
        self.messages += times * (post.kind != "receive")
        self.sent_bytes += times * post.sent_bytes
        self.received_bytes += times * post.received_bytes


class Activity:
    """Operation that may be called many times under one label.

    Attributes:
        label: label of the operation.
        row: totals to which the calls are added by :meth:`flush`.
        posts: messages of one call; empty if they are counted one by one.
        calls, seconds: counts that have not been flushed yet.
    """

    __slots__ = ("__weakref__", "calls", "label", "posts", "row", "seconds")

    def __init__(self, label: str, row: OperatorTotals, posts: Sequence[Post] = ()) -> None:
        self.label = label
        self.row = row
        self.posts = tuple(posts)
        self.calls = 0
        self.seconds = 0.0

    def flush(self) -> None:
        """Move the counts to the row."""
        self.row.calls += self.calls
        self.row.seconds += self.seconds
        for post in self.posts:
            self.row.add(post, self.calls)
        self.calls, self.seconds = 0, 0.0

    # Calls of evicted movements still count.
    __del__ = flush


# Entry of the flight recorder: activity, start and end time (``None`` if not complete). A list,
# because creating an object would double the cost of recording.
Operation = list[Any]
ACTIVITY, START_S, END_S = range(3)


class Observer:
    """Receiver of every operation of a rank, called in the rank's thread."""

    def begin_call(self, operation: Operation, phase: Phase) -> None:
        """Handle the beginning of a call: an operation, its start, or the wait for its end."""

    def post_message(self, operation: Operation, post: Post, number: int) -> None:
        """Handle a message about to be posted, numbered among those to or from its peer."""

    def end_call(self, operation: Operation) -> None:
        """Handle the end of a call, successful or not. Calls do not overlap."""


class FlightRecorder:
    """Recorder of the last operations of this rank, oldest first, and of totals of all operations.

    The recorder is cheap enough to be always enabled. :meth:`begin` and :meth:`end` record an
    operation and notify the observers. Without observers, time-critical callers may instead
    :meth:`remember` an entry and update the counts of its activity themselves.

    Attributes:
        observers: receivers of every operation.
        number_of: returns the number of the next message to (or from) a world rank, if the
            transport counts them.
        remember: appends an entry.
    """

    def __init__(self, capacity: int = _KEPT) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.number_of: Callable[[bool, int], int] | None = None
        self._labelled = Cache[str, Activity](4096)
        self._operations: deque[Operation] = deque(maxlen=capacity)
        self.remember = self._operations.append
        self._rows: dict[tuple[str, str], OperatorTotals] = {}
        self._activities: WeakSet[Activity] = WeakSet()
        self._group: Operation | None = None
        self._announced: Counter[tuple[bool, int]] = Counter()
        self._cleared = 0

    def new_activity(self, label: str, posts: Sequence[Post] = ()) -> Activity:
        """Create an activity for ``label`` with the given messages per call."""
        key = operator_and_partition(label)
        activity = Activity(label, self._rows.setdefault(key, OperatorTotals(*key)), posts)
        self._activities.add(activity)
        return activity

    def activity(self, label: str) -> Activity:
        """Return the cached activity of a label; :meth:`record_post` counts its messages."""
        return self._labelled.get_or_make(label, lambda: self.new_activity(label))

    @property
    def count(self) -> int:
        """Number of complete operations."""
        # Other threads also read this property, so it must not flush activities.
        in_rows = sum(row.calls for row in tuple(self._rows.values()))
        return self._cleared + in_rows + sum(each.calls for each in self._every_activity())

    def begin(self, activity: Activity, phase: Phase = "run") -> Operation:
        """Record the beginning of an operation and of the first call for it."""
        operation: Operation = [activity, monotonic(), None]
        self.remember(operation)
        if self.observers:
            self._announce(operation, phase)
        return operation

    def enter(self, operation: Operation) -> float:
        """Record that the rank waits for a started operation; return the time."""
        if self.observers:
            self._announce(operation, "wait")
        return monotonic()

    def leave(self, operation: Operation, entered_s: float | None = None) -> None:
        """Record the end of a call whose operation continues or has failed."""
        since_s = operation[START_S] if entered_s is None else entered_s
        operation[ACTIVITY].seconds += monotonic() - since_s
        for observer in reversed(self.observers):
            observer.end_call(operation)

    def end(self, operation: Operation, entered_s: float | None = None) -> None:
        """Record that an operation is complete, together with its call."""
        operation[END_S] = monotonic()
        operation[ACTIVITY].calls += 1
        self.leave(operation, entered_s)

    def drop(self, operation: Operation) -> None:
        """Remove an operation that was rejected before anything was posted."""
        if self._operations and self._operations[-1] is operation:
            self._operations.pop()

    def begin_group(self, label: str) -> Operation:
        """Begin an operation whose messages :meth:`record_post` records one by one."""
        self._group = self.begin(self.activity(label))
        return self._group

    def record_post(self, post: Post, number: int | None = None) -> None:
        """Record a message of the current group, with its number if the transport has one."""
        operation = self._group
        if operation is None:
            return
        operation[ACTIVITY].row.add(post)
        if self.observers:
            self._tell(operation, post, number)

    def lines(self, last: int = 5) -> list[str]:
        """Describe the last operations, the most recent at the end."""
        now = monotonic()
        operations = list(self._operations)
        first = self.count - sum(operation[END_S] is not None for operation in operations)
        return [
            f"#{number} {operation[ACTIVITY].label}: {_state(operation, now)}"
            for number, operation in list(enumerate(operations, first))[-last:]
        ]

    def rows(self) -> list[OperatorTotals]:
        """Return the nonzero totals, sorted by operator and partition."""
        for activity in self._every_activity():
            activity.flush()
        return [row for _, row in sorted(self._rows.items()) if row.calls or row.messages]

    def _every_activity(self) -> list[Activity]:
        while True:
            try:
                return list(self._activities)
            except RuntimeError:
                # Another thread added a row during the iteration.
                continue

    def clear(self) -> None:
        """Reset all totals to zero."""
        for activity in self._every_activity():
            activity.flush()
        self._cleared = self.count
        for row in self._rows.values():
            row.clear()

    def observe(self, observer: Observer) -> None:
        """Add an observer."""
        self.observers = (*self.observers, observer)

    def ignore(self, observer: Observer) -> None:
        """Remove an observer if it was added."""
        self.observers = tuple(other for other in self.observers if other is not observer)

    def _announce(self, operation: Operation, phase: Phase) -> None:
        for observer in self.observers:
            observer.begin_call(operation, phase)
        if phase == "wait":
            return
        before: Counter[tuple[bool, int]] = Counter()
        for post in operation[ACTIVITY].posts:
            key = post.kind != "receive", post.peer
            number = self.number_of(*key) + before[key] if self.number_of is not None else None
            before[key] += 1
            self._tell(operation, post, number)

    def _tell(self, operation: Operation, post: Post, number: int | None) -> None:
        if number is None:
            key = post.kind != "receive", post.peer
            number = self._announced[key]
            self._announced[key] += 1
        for observer in self.observers:
            observer.post_message(operation, post, number)


def _state(operation: Operation, now: float) -> str:
    if operation[END_S] is None:
        return f"waiting for {now - operation[START_S]:.1f} s"
    return "finished"


def posts_between(
    carried: MessageStage, stage: Stage, ranks: Sequence[int], rank: int, dtype: torch.dtype
) -> tuple[Post, ...]:
    """Return what ``rank`` posts between world ``ranks`` for ``stage``, in posting order.

    Args:
        carried: what the transport carries for ``stage``.
    """
    item_bytes = dtype.itemsize
    posts = [
        post_of(sends, ranks[message.peer], message.volume * item_bytes)
        for sends, messages in (
            (True, (*carried.sends, *carried.relays)),
            (False, (*carried.incoming, *carried.relayed)),
        )
        for message in messages
    ]
    given_bytes = prod(stage.input_shape or (0,)) * item_bytes
    taken_bytes = prod(stage.output_shape or (0,)) * item_bytes
    for collective in carried.collectives:
        is_root, kind = rank == collective.root, collective.kind
        gives = kind == "all_reduce" or is_root == (kind == "broadcast")
        takes = kind == "all_reduce" or is_root == (kind == "reduce")
        root = ranks[collective.root]
        posts.append(Post(kind, root, given_bytes if gives else 0, taken_bytes if takes else 0))
    return tuple(posts)
