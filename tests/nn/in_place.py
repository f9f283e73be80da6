"""Layers that use their block in place however small it is, and a check that they did."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from gpudist.nn.windowed import block_in_place

_lock = threading.Lock()
_inside = 0
_smallest_block_bytes = block_in_place.SMALLEST_BLOCK_BYTES


@contextmanager
def blocks_of_any_size() -> Generator[None]:
    """Accept blocks of any size inside; ranks that are threads may enter and leave at any time."""
    global _inside
    with _lock:
        _inside += 1
        block_in_place.SMALLEST_BLOCK_BYTES = 0
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                block_in_place.SMALLEST_BLOCK_BYTES = _smallest_block_bytes


def has_faces(layer: Any) -> bool:
    """Return whether the layer used its last block in place, and ghosts apart."""
    return list(layer._bindings._results.values())[-1].in_place is not None


def has_ghosts(layer: Any) -> bool:
    return list(layer._bindings._results.values())[-1].halo is not None
