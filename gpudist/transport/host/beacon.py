"""Detect whether two processes share a node, by tokens that only local processes can read."""

from __future__ import annotations

import os
import stat


class Beacon:
    """Token in an anonymous file of this process, which other processes on its node can read.

    Hostnames and boot ids do not identify nodes: containers on one machine may share both and have
    equal process ids, and so may clones of a virtual machine.

    Attributes:
        text: location and content of the token, for :func:`is_beside`.
    """

    def __init__(self) -> None:
        token = os.urandom(16).hex()
        try:
            self._descriptor = os.memfd_create("gpudist beacon", os.MFD_CLOEXEC)
            os.write(self._descriptor, token.encode())
        except OSError:
            # The system forbids memfd_create: other processes cannot find this one.
            self._descriptor = -1
        self.text = f"{os.getpid()} {self._descriptor} {token}"

    @property
    def is_lit(self) -> bool:
        """Whether other processes can find the token."""
        return self._descriptor >= 0

    def close(self) -> None:
        """Remove the token."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_beside(text: str) -> bool:
    """Return whether this process can see the process that published a beacon's ``text``."""
    try:
        pid, descriptor, token = text.split()
        path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
        # The id may belong to an unrelated process: do not open files of other kinds or sizes.
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(token):
            return False
        with open(path, "rb") as file:
            return file.read() == token.encode()
    except (OSError, ValueError):
        return False
