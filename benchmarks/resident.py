"""Resident memory of this process, from /proc; needs nothing but Python."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def status_mib(name: str) -> float:
    """Return a number of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024 / MIB


def own_mib() -> float:
    """Return the resident memory without pages of files, such as the code of libraries."""
    return status_mib("VmRSS") - status_mib("RssFile")


def own_peak_mib() -> float:
    """Return the peak without the pages of files that are resident now."""
    return status_mib("VmHWM") - status_mib("RssFile")


def forget_peak() -> None:
    """Make the peak, ``VmHWM``, start again from the present memory."""
    Path("/proc/self/clear_refs").write_text("5")
