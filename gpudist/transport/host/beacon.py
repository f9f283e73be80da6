"""Whether two processes are on one node: each shows what only a process beside it can read."""

from __future__ import annotations

import os
import stat


class Beacon:
    """A token in memory of this process, for the others on its node to find.

    Hostnames and boot ids do not tell nodes apart: containers of one machine have both in common
    and number their processes alike, and so do copies of one virtual machine.

    Attributes:
        text: where the token is and what it says, for :func:`is_beside`.
    """

    def __init__(self) -> None:
        token = os.urandom(16).hex()
        try:
            self._descriptor = os.memfd_create("gpudist beacon", os.MFD_CLOEXEC)
            os.write(self._descriptor, token.encode())
        except OSError:
            # The system does not let this process: nobody sees it.
            self._descriptor = -1
        self.text = f"{os.getpid()} {self._descriptor} {token}"

    @property
    def is_lit(self) -> bool:
        """Whether others can find it."""
        return self._descriptor >= 0

    def close(self) -> None:
        """Put it out; it goes with the process as well."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_beside(text: str) -> bool:
    """Whether the process whose beacon this is shares processes and memory with this one."""
    try:
        pid, descriptor, token = text.split()
        path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
        # It may be another process of that number: whatever it has open is left alone.
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size != len(token):
            return False
        with open(path, "rb") as file:
            return file.read() == token.encode()
    except (OSError, ValueError):
        return False
