"""Resident memory of this process, from /proc; needs nothing but Python."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def status_mib(name: str) -> float:
    """Return a number of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024 / MIB


def forget_peak() -> None:
    """Make the peak, ``VmHWM``, start again from the present memory."""
    Path("/proc/self/clear_refs").write_text("5")
