"""What a rank has done: its last operations, and the totals of each kind of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakSet

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

    def add(self, post: Post, times: int = 1) -> None:
        self.messages += times * (post.kind != "receive")
        self.sent_bytes += times * post.sent_bytes
        self.received_bytes += times * post.received_bytes


class Activity:
    """What is done under one label, as often as it is done.

    Attributes:
        row: to which its calls are added, now and then.
        posts: the messages of one call; none where they are counted one by one.
        calls, seconds: not yet in the row.
    """

    __slots__ = ("__weakref__", "calls", "label", "posts", "row", "seconds")

    def __init__(self, label: str, row: Row, posts: Sequence[Post] = ()) -> None:
        self.label = label
        self.row = row
        self.posts = tuple(posts)
        self.calls = 0
        self.seconds = 0.0

    def flush(self) -> None:
        """Add what was counted to the row."""
        self.row.calls += self.calls
        self.row.seconds += self.seconds
        for post in self.posts:
            self.row.add(post, self.calls)
        self.calls, self.seconds = 0, 0.0

    # Movements of passing shapes are forgotten, and their calls are not.
    __del__ = flush


# An entry of the flight recorder: what is done, since when, and when it was complete (``None``:
# not yet). A list, since an object would cost as much as all else that is recorded.
Operation = list[Any]
ACTIVITY, START_S, END_S = range(3)


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

    Cheap enough to be always on. :meth:`remember` an operation, and count its calls and seconds in
    its activity, where every nanosecond counts; :meth:`begin` and :meth:`end` do all of that, and
    are a must where there are observers.

    Attributes:
        observers: hear of each operation.
        number_of: the number of the next message to (or from) a world rank, where the wire knows.
        remember: take an entry.
    """

    def __init__(self, capacity: int = _KEPT) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.number_of: Callable[[bool, int], int] | None = None
        self._labelled: dict[str, Activity] = {}
        self._operations: deque[Operation] = deque(maxlen=capacity)
        self.remember = self._operations.append
        self._rows: dict[tuple[str, str], Row] = {}
        self._activities: WeakSet[Activity] = WeakSet()
        self._group: Operation | None = None
        self._announced: Counter[tuple[bool, int]] = Counter()
        self._cleared = 0

    def new_activity(self, label: str, posts: Sequence[Post] = ()) -> Activity:
        """What is done under ``label``, with these messages at each call."""
        key = operator_and_partition(label)
        activity = Activity(label, self._rows.setdefault(key, Row(*key)), posts)
        self._activities.add(activity)
        return activity

    def activity(self, label: str) -> Activity:
        """The one of a label, remembered; its messages are counted as they are :meth:`posted`."""
        found = self._labelled.get(label)
        if found is None:
            if len(self._labelled) >= _REMEMBERED_LABELS:
                self._labelled.clear()
            found = self._labelled[label] = self.new_activity(label)
        return found

    @property
    def count(self) -> int:
        """Operations that were complete so far."""
        # Asked from other threads too, which must not add anything to rows.
        in_rows = sum(row.calls for row in tuple(self._rows.values()))
        return self._cleared + in_rows + sum(each.calls for each in self._every_activity())

    def begin(self, activity: Activity, phase: Phase = "run") -> Operation:
        """An operation begins, and the rank is in a call of it."""
        operation: Operation = [activity, monotonic(), None]
        self.remember(operation)
        if self.observers:
            self._announce(operation, phase)
        return operation

    def enter(self, operation: Operation) -> float:
        """The rank waits for an operation that has been started; returns the time."""
        if self.observers:
            self._announce(operation, "wait")
        return monotonic()

    def leave(self, operation: Operation, entered_s: float | None = None) -> None:
        """The call of an operation has ended, which itself goes on, or has failed."""
        since_s = operation[START_S] if entered_s is None else entered_s
        operation[ACTIVITY].seconds += monotonic() - since_s
        for observer in reversed(self.observers):
            observer.left(operation)

    def end(self, operation: Operation, entered_s: float | None = None) -> None:
        """The operation is complete, and with it this call."""
        operation[END_S] = monotonic()
        operation[ACTIVITY].calls += 1
        self.leave(operation, entered_s)

    def drop(self, operation: Operation) -> None:
        """The call was refused before anything was posted."""
        if self._operations and self._operations[-1] is operation:
            self._operations.pop()

    def begin_group(self, label: str) -> Operation:
        """An operation whose messages are :meth:`posted` one by one until it ends or fails."""
        self._group = self.begin(self.activity(label))
        return self._group

    def posted(self, post: Post, number: int | None = None) -> None:
        """A message of the group that began last, with its number where the wire has one."""
        operation = self._group
        if operation is None:
            return
        operation[ACTIVITY].row.add(post)
        if self.observers:
            self._tell(operation, post, number)

    def lines(self, last: int = 5) -> list[str]:
        """The last operations in words, the most recent at the end."""
        now = monotonic()
        operations = list(self._operations)
        first = self.count - sum(operation[END_S] is not None for operation in operations)
        return [
            f"#{number} {operation[ACTIVITY].label}: {_state(operation, now)}"
            for number, operation in list(enumerate(operations, first))[-last:]
        ]

    def rows(self) -> list[Row]:
        """The totals of what was done at all, by operator and partition."""
        for activity in self._every_activity():
            activity.flush()
        return [row for _, row in sorted(self._rows.items()) if row.calls or row.messages]

    def _every_activity(self) -> list[Activity]:
        while True:
            try:
                return list(self._activities)
            except RuntimeError:
                # Another thread made one meanwhile.
                continue

    def clear(self) -> None:
        """Count from zero."""
        for activity in self._every_activity():
            activity.flush()
        self._cleared = self.count
        for row in self._rows.values():
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
            observer.posted(operation, post, number)


def _state(operation: Operation, now: float) -> str:
    if operation[END_S] is None:
        return f"waiting for {now - operation[START_S]:.1f} s"
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
