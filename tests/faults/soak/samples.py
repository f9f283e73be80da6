"""Resources that a rank holds at one moment of a long run."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

from gpudist.world.partition import Partition
from tests.faults.ranks import descriptors

PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class _Held(ctypes.Structure):
    """Return value of mallinfo2(3)."""

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
    """Sample of one rank.

    Attributes:
        operators: operators carried out so far.
        seconds: monotonic time.
        resident_bytes: memory of this process in RAM after the C library has returned what it
            can. It keeps holes between long-lived blocks, and their number grows with time.
        allocated_bytes: memory of the C library in use.
        python_blocks: blocks of Python's own memory in use.
        descriptors: open files, pipes and sockets.
        threads: threads of this process, native ones included.
        segments: mappings of gpudist's shared memory.
        shm_files: entries of /dev/shm that are gpudist's, or open or mapped in this process.
        communicators: communicators of the world.
        remembered: operators that functions have cached for the world.
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
    links = descriptors()
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
    """Return one attribute of every rank's samples."""
    assert name in {each.name for each in fields(Sample)}
    return [[float(getattr(sample, name)) for sample in samples] for samples in by_rank]
