"""What a rank holds at one moment of a long run."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

from gpudist.world.partition import Partition

PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class _Held(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Held


@dataclass(frozen=True)
class Sample:
    """Of one rank.

    Attributes:
        operators: carried out so far.
        seconds: of the monotonic clock.
        resident_bytes: memory of this process that is in RAM, when the C library has given back
            what it can: it keeps holes between what lives long, and has more of them with time.
        allocated_bytes: of the C library, in use.
        python_blocks: of Python's own memory, in use.
        descriptors: files, pipes and sockets that are open.
        threads: of this process, native ones too.
        segments: mappings of gpudist's shared memory.
        shm_files: entries of /dev/shm that are gpudist's, or open or mapped in this process.
        communicators: of the world.
        remembered: operators that functions have made for the world.
    """

    operators: int
    seconds: float
    resident_bytes: int
    allocated_bytes: int
    python_blocks: int
    descriptors: int
    threads: int
    segments: int
    shm_files: int
    communicators: int
    remembered: int


BYTES = ("resident_bytes", "allocated_bytes")
COUNTS = ("descriptors", "threads", "segments", "shm_files", "communicators")


def take(P_world: Partition | None, operators: int) -> Sample:
    """This process' sample, of this rank if it is one now, after a collection of garbage."""
    gc.collect()
    _libc.malloc_trim(0)
    held = _libc.mallinfo2()
    maps = Path("/proc/self/maps").read_text().splitlines()
    links = _links()
    wire = P_world.wire if P_world is not None else None
    return Sample(
        operators=operators,
        seconds=time.monotonic(),
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES,
        allocated_bytes=held.uordblks + held.hblkhd,
        python_blocks=sys.getallocatedblocks(),
        descriptors=len(links),
        threads=len(os.listdir("/proc/self/task")),
        segments=sum("memfd:gpudist" in line for line in maps),
        shm_files=sum("gpudist" in name for name in os.listdir("/dev/shm"))
        + sum("/dev/shm/" in line for line in [*maps, *links]),
        communicators=len(wire._communicators) if wire is not None else 0,
        remembered=len(wire.remembered) if wire is not None else 0,
    )


def series(by_rank: list[list[Sample]], name: str) -> list[list[float]]:
    """One attribute of every rank's samples."""
    assert name in {each.name for each in fields(Sample)}
    return [[float(getattr(sample, name)) for sample in samples] for samples in by_rank]


def _links() -> list[str]:
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # that of the listing itself
    return found
