"""Print one line per message, which shows what a program sends and where it hangs."""

from __future__ import annotations

import sys
import time
from typing import Any

from gpudist.transport.flight_recorder import ACTIVITY, Observer, Operation, Post


class DebugLines(Observer):
    """Observer that prints each message of a rank when it is posted.

    Args:
        rank: world rank of this process.
        file: file to write to, by default standard error.
    """

    def __init__(self, rank: int, file: Any = None) -> None:
        self._rank = rank
        self._file = file
        self._start_s = time.monotonic()

    def post_message(self, operation: Operation, post: Post, number: int) -> None:
        at_s = time.monotonic() - self._start_s
        size_bytes = max(post.sent_bytes, post.received_bytes)
        where = {"send": "to", "receive": "from"}.get(post.kind, "root")
        # Write the line at once, since other ranks write to the same terminal.
        (self._file or sys.stderr).write(
            f"gpudist: rank {self._rank} {at_s:.6f} s: {post.kind} {where} {post.peer}, message "
            f"{number}, {size_bytes} bytes: {operation[ACTIVITY].label}\n"
        )
