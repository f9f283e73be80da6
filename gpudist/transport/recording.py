"""What a rank has done: its last operations, and the totals of each kind of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import monotonic
from typing import Literal, NamedTuple, Protocol

import torch

from gpudist.geometry.messages import MessageStage
from gpudist.transport.labels import operator_and_partition

Phase = Literal["run", "start", "wait"]

_KEPT = 64
_REMEMBERED_LABELS = 4096


class Post(NamedTuple):
    """A message, or a collective of the wire's own, as this rank sees it.

    Attributes:
        kind: ``"send"``, ``"receive"``, or the collective.
        peer: world rank of the other side, or of the root.
    """

    kind: str
    peer: int
    sent_bytes: int
    received_bytes: int


class Row:
    """Totals of one operator over one partition on this rank.

    Attributes:
        calls: that were complete.
        messages: sent; a collective of the wire's own is one.
        sent_bytes, received_bytes: of the cells in messages, headers not included.
        seconds: inside the calls, on the host; zero over a wire that does not wait.
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


class Activity:
    """What is done under one label, as often as it is done.

    Attributes:
        row: to which its calls are added.
        posts: the messages of one call; none where they are counted one by one.
        messages, sent_bytes, received_bytes: of one call, by ``posts``.
    """

    __slots__ = ("label", "messages", "posts", "received_bytes", "row", "sent_bytes")

    def __init__(self, label: str, row: Row, posts: Sequence[Post] = ()) -> None:
        self.label = label
        self.row = row
        self.posts = tuple(posts)
        self.messages = sum(post.kind != "receive" for post in self.posts)
        self.sent_bytes = sum(post.sent_bytes for post in self.posts)
        self.received_bytes = sum(post.received_bytes for post in self.posts)


class Operation:
    """One entry of the flight recorder.

    Attributes:
        start_s, entered_s: when it began, and when this rank was in a call of it last.
        end_s: when it was complete; ``None`` before.
    """

    __slots__ = ("activity", "end_s", "entered_s", "start_s")

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self.end_s: float | None = None
        self.start_s = self.entered_s = monotonic()


class Observer(Protocol):
    """Hears of every operation of a rank, in its thread, while it is attached."""

    def entered(self, operation: Operation, phase: Phase) -> None:
        """The rank is now in a call: the whole operation, its start, or a wait for its end."""
        ...

    def posted(self, operation: Operation, post: Post, number: int) -> None:
        """A message is about to be posted, with its number among those to or from its peer."""
        ...

    def left(self, operation: Operation) -> None:
        """The call has ended, well or not. Calls do not overlap."""
        ...


class FlightRecorder:
    """The last operations of this rank, oldest first, and the totals of all.

    Cheap enough to be always on.

    Attributes:
        count: operations begun so far.
        observers: hear of each; costs something only while there are any.
        number_of: the number of the next message to (or from) a world rank, where the wire knows.
    """

    def __init__(self, capacity: int = _KEPT) -> None:
        self.count = 0
        self.observers: tuple[Observer, ...] = ()
        self.number_of: Callable[[bool, int], int] | None = None
        self.activity = lru_cache(_REMEMBERED_LABELS)(self._activity_of)
        self._operations: deque[Operation] = deque(maxlen=capacity)
        self._rows: dict[tuple[str, str], Row] = {}
        self._group: Operation | None = None
        self._announced: Counter[tuple[bool, int]] = Counter()

    def new_activity(self, label: str, posts: Sequence[Post] = ()) -> Activity:
        """What is done under ``label``, with these messages at each call."""
        key = operator_and_partition(label)
        return Activity(label, self._rows.setdefault(key, Row(*key)), posts)

    def _activity_of(self, label: str) -> Activity:
        """The same of messages that are counted when they are posted; remembered."""
        return self.new_activity(label)

    def begin(self, activity: Activity, phase: Phase = "run") -> Operation:
        """An operation begins, and the rank is in a call of it."""
        operation = Operation(activity)
        self.count += 1
        self._operations.append(operation)
        if self.observers:
            self._announce(operation, phase)
        return operation

    def enter(self, operation: Operation) -> None:
        """The rank waits for an operation that has been started."""
        operation.entered_s = monotonic()
        if self.observers:
            self._announce(operation, "wait")

    def leave(self, operation: Operation) -> None:
        """The call of an operation has ended, which itself goes on, or has failed."""
        operation.activity.row.seconds += monotonic() - operation.entered_s
        if self.observers:
            for observer in reversed(self.observers):
                observer.left(operation)

    def end(self, operation: Operation) -> None:
        """The operation is complete, and with it this call."""
        now = monotonic()
        operation.end_s = now
        activity = operation.activity
        row = activity.row
        row.calls += 1
        row.messages += activity.messages
        row.sent_bytes += activity.sent_bytes
        row.received_bytes += activity.received_bytes
        row.seconds += now - operation.entered_s
        if self.observers:
            for observer in reversed(self.observers):
                observer.left(operation)

    def count_only(self, activity: Activity) -> None:
        """An operation that nobody waits for here, and that another recorder remembers."""
        self.count += 1
        row = activity.row
        row.calls += 1
        row.messages += activity.messages
        row.sent_bytes += activity.sent_bytes
        row.received_bytes += activity.received_bytes

    def drop(self, operation: Operation) -> None:
        """The call was refused before anything was posted."""
        operation.end_s = operation.start_s
        self.leave(operation)

    def begin_group(self, label: str) -> Operation:
        """An operation whose messages are :meth:`posted` one by one until it ends or fails."""
        self._group = self.begin(self.activity(label))
        return self._group

    def posted(self, post: Post, number: int | None = None) -> None:
        """A message of the group that began last, with its number where the wire has one."""
        operation = self._group
        if operation is None:
            return
        row = operation.activity.row
        row.messages += post.kind != "receive"
        row.sent_bytes += post.sent_bytes
        row.received_bytes += post.received_bytes
        if self.observers:
            self._tell(operation, post, number)

    def lines(self, last: int = 5) -> list[str]:
        """The last operations in words, the most recent at the end."""
        now = monotonic()
        operations = list(self._operations)
        first = self.count - len(operations)
        return [
            f"#{first + i} {op.activity.label}: {_state(op, now)}"
            for i, op in list(enumerate(operations))[-last:]
        ]

    def rows(self) -> list[Row]:
        """The totals of what was done at all, by operator and partition."""
        return [row for _, row in sorted(self._rows.items()) if row.calls or row.messages]

    def clear(self) -> None:
        """Count from zero."""
        for row in list(self._rows.values()):
            row.clear()

    def observe(self, observer: Observer) -> None:
        """Attach ``observer``."""
        self.observers = (*self.observers, observer)

    def ignore(self, observer: Observer) -> None:
        """Detach ``observer``; nothing to do if it is not attached."""
        self.observers = tuple(other for other in self.observers if other is not observer)

    def _announce(self, operation: Operation, phase: Phase) -> None:
        for observer in self.observers:
            observer.entered(operation, phase)
        if phase == "wait":
            return
        before: Counter[tuple[bool, int]] = Counter()
        for post in operation.activity.posts:
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
            observer.posted(operation, post, number)


def _state(operation: Operation, now: float) -> str:
    if operation.end_s is None:
        return f"waiting for {now - operation.start_s:.1f} s"
    return "finished"


def posts_between(
    stage: MessageStage, ranks: Sequence[int], dtype: torch.dtype
) -> tuple[Post, ...]:
    """The messages of ``stage``, in the order of their posting, between world ``ranks``."""
    item_bytes = dtype.itemsize
    sends = [(ranks[m.peer], m.volume * item_bytes) for m in (*stage.sends, *stage.relays)]
    receives = [(ranks[m.peer], m.volume * item_bytes) for m in (*stage.incoming, *stage.relayed)]
    return (
        *(Post("send", peer, size_bytes, 0) for peer, size_bytes in sends),
        *(Post("receive", peer, 0, size_bytes) for peer, size_bytes in receives),
    )
