"""Explain the framework's decisions: which signatures it chose, and what it boxed for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

logger = logging.getLogger("gpudist.sbp")
# What the logger found before for each level. An empty cache is unknown.
debug_logs: dict[int, bool] = logger._cache  # pyright: ignore
open_lines: ContextVar[tuple[list[str], ...]] = ContextVar("open_lines", default=())


@contextmanager
def explain() -> Iterator[list[str]]:
    """Collect one line for each operator on global tensors that this rank executes in the context.

    A line states the attributes of inputs and outputs, the inputs that were boxed, and the bytes
    that boxing moves between all ranks. The logger ``gpudist.sbp`` logs the same lines at level
    DEBUG.
    """
    lines: list[str] = []
    token = open_lines.set((*open_lines.get(), lines))
    try:
        yield lines
    finally:
        open_lines.reset(token)


def is_explaining() -> bool:
    """Return whether any context or logger collects the lines.

    It is false if ``open_lines`` is empty and ``debug_logs`` says so.
    """
    return bool(open_lines.get()) or logger.isEnabledFor(logging.DEBUG)


def say(line: str) -> None:
    """Append a line to every open collection, and log it."""
    logger.debug(line)
    for lines in open_lines.get():
        lines.append(line)
