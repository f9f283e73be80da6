"""Whether a process of this node still runs."""

from __future__ import annotations

import errno
import os
import select


def has_ended(pid: int) -> bool:
    """Whether it has, also where its parent has not asked how."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        # Nobody has the number, or what has it is no process: a thread, a session.
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return True
        raise
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(process)
