"""Explain the framework's decisions: the signatures it chose, and what it boxed for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

logger = logging.getLogger("gpudist.sbp")
_open: ContextVar[tuple[list[str], ...]] = ContextVar("explained", default=())


@contextmanager
def explain() -> Iterator[list[str]]:
    """Collect a line for each operator on global tensors carried out within, on this rank.

    A line has the attributes of inputs and outputs, the inputs that were boxed, and the bytes that
    boxing moves between all ranks. The logger ``gpudist.sbp`` has the same lines at level DEBUG.
    """
    lines: list[str] = []
    token = _open.set((*_open.get(), lines))
    try:
        yield lines
    finally:
        _open.reset(token)


def is_explaining() -> bool:
    """Return whether any reader collects the lines."""
    return bool(_open.get()) or logger.isEnabledFor(logging.DEBUG)


def say(line: str) -> None:
    """Pass a line to all readers."""
    logger.debug(line)
    for lines in _open.get():
        lines.append(line)
