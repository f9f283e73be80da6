"""Whether a process of this node still runs."""

from __future__ import annotations

import os
import select


def has_ended(pid: int) -> bool:
    """Whether it has, also where its parent has not asked how."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 0)[0])
    finally:
        os.close(process)
