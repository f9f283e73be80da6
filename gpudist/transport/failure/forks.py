"""Forked children: a world belongs to the process that joined it, not to its children."""

from __future__ import annotations

import ctypes
import os
from typing import Any
from weakref import WeakSet

# Resources that a forked child must leave to its parent.
_joined: WeakSet[Any] = WeakSet()


def leave_to_parent_after_fork(joined: Any) -> None:
    """Call ``joined.leave_to_parent()`` in every child that this process forks."""
    _joined.add(joined)


def keep_for_good(thing: object) -> None:
    """Never free ``thing``, whose destructor would wait for threads that may no longer exist."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def words_of_child(transport: str, rank: int) -> str:
    """Return the message for a forked child that uses its parent's transport."""
    return (
        f"process {os.getpid()} was forked from rank {rank}, whose {transport} transport belongs "
        "to the parent: move data in the parent, or start the process by 'spawn' or 'forkserver'"
    )


def _leave_all() -> None:
    for joined in list(_joined):
        joined.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)
