"""Explain the framework's decisions: which signatures it chose, and what it boxed for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

logger = logging.getLogger("gpudist.sbp")
_open: ContextVar[tuple[list[str], ...]] = ContextVar("explained", default=())


@contextmanager
def explain() -> Iterator[list[str]]:
    """Collect one line for each operator on global tensors that this rank executes in the context.

    A line states the attributes of inputs and outputs, the inputs that were boxed, and the bytes
    that boxing moves between all ranks. The logger ``gpudist.sbp`` logs the same lines at level
    DEBUG.
    """
    lines: list[str] = []
    token = _open.set((*_open.get(), lines))
    try:
        yield lines
    finally:
        _open.reset(token)


def is_explaining() -> bool:
    """Return whether any context or logger collects the lines."""
    # On the path of every call: what the logger found before costs no call of Python's.
    logs = logger._cache.get(logging.DEBUG)  # pyright: ignore
    return bool(_open.get()) or (logger.isEnabledFor(logging.DEBUG) if logs is None else logs)


def say(line: str) -> None:
    """Append a line to every open collection, and log it."""
    logger.debug(line)
    for lines in _open.get():
        lines.append(line)
