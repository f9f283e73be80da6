"""Record the calls of a rank, and convert them to events of Chrome's trace format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from gpudist.transport.flight_recorder import ACTIVITY, Observer, Operation, Phase, Post

Event = dict[str, Any]


@dataclass
class TracedCall:
    """One call of an operation.

    Attributes:
        operation: operation that was called.
        phase: phase of the operation.
        start_ns, end_ns: start and end by this rank's monotonic clock, in nanoseconds.
        messages: messages posted in the call, and their numbers.
    """

    operation: Operation
    phase: Phase
    start_ns: int
    end_ns: int = 0
    messages: list[tuple[Post, int]] = field(default_factory=list)


class Tracer(Observer):
    """Observer that records every call."""

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []

    def begin_call(self, operation: Operation, phase: Phase) -> None:
        self.calls.append(TracedCall(operation, phase, monotonic_ns()))

    def post_message(self, operation: Operation, post: Post, number: int) -> None:
        self.calls[-1].messages.append((post, number))

    def end_call(self, operation: Operation) -> None:
        self.calls[-1].end_ns = monotonic_ns()


def events_of(calls: list[TracedCall], rank: int, align: Callable[[int], float]) -> list[Event]:
    """Create slices for calls, and arrows for messages, which end where the receiver waits.

    Args:
        calls: calls of ``rank``.
        rank: rank, shown as a process.
        align: function from this rank's clock to the common clock, in nanoseconds.
    """
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "gpudist"}},
    ]
    arriving: dict[int, list[tuple[Post, int]]] = {}
    for call in calls:
        start_us = align(call.start_ns) / 1e3
        end_us = max(start_us, align(call.end_ns or call.start_ns) / 1e3)
        where = {"pid": rank, "tid": 0, "cat": "gpudist"}
        events.append({
            **where, "ph": "X", "name": _name(call), "ts": start_us, "dur": end_us - start_us,
            "args": _arguments(call),
        })  # fmt: skip
        for post, number in call.messages:
            if post.kind == "send":
                arrow = _arrow(rank, post.peer, number)
                events.append({**where, **arrow, "ph": "s", "ts": start_us})
        received = [(post, number) for post, number in call.messages if post.kind == "receive"]
        if call.phase == "start":
            arriving[id(call.operation)] = received
            continue
        if call.phase == "wait":
            received = arriving.pop(id(call.operation), [])
        for post, number in received:
            events.append({
                **where, **_arrow(post.peer, rank, number), "ph": "f", "bp": "e", "ts": end_us,
            })  # fmt: skip
    return events


def _name(call: TracedCall) -> str:
    row = call.operation[ACTIVITY].row
    name = f"{row.operator} {row.partition}".rstrip()
    return name if call.phase == "run" else f"{name} ({call.phase})"


def _arguments(call: TracedCall) -> dict[str, Any]:
    posts = [post for post, _ in call.messages]
    return {
        "operation": call.operation[ACTIVITY].label,
        "messages sent": sum(post.kind != "receive" for post in posts),
        "bytes sent": sum(post.sent_bytes for post in posts),
        "bytes received": sum(post.received_bytes for post in posts),
        "peers": sorted({post.peer for post in posts}),
    }


def _arrow(source: int, target: int, number: int) -> Event:
    return {"name": "message", "id": f"{source}-{target}-{number}"}
