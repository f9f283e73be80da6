"""Resident memory of this process, from /proc; needs nothing but Python."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def status_mib(name: str, file: str = "status") -> float:
    """Return a number of a file of /proc/self, in MiB."""
    lines = Path("/proc/self", file).read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024 / MIB


def own_mib() -> float:
    """Return the resident memory without pages of files, such as the code of libraries.

    Each process counts its share, 1/n, of a page that n processes use.
    """
    return status_mib("VmRSS") - _counted_elsewhere_mib()


def own_peak_mib() -> float:
    """Return the peak without pages of files and parts of others, as they are resident now."""
    return status_mib("VmHWM") - _counted_elsewhere_mib()


def _counted_elsewhere_mib() -> float:
    shared = status_mib("RssShmem") - status_mib("Pss_Shmem", "smaps_rollup")
    return status_mib("RssFile") + shared


def forget_peak() -> None:
    """Make the peak, ``VmHWM``, start again from the present memory."""
    Path("/proc/self/clear_refs").write_text("5")
