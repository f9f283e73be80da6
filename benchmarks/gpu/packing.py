"""Pack two faces of a tensor in one launch, unpack them, and add them into place.

Rows lie in a wider tensor four rows apart, the two faces in different columns. Targets: for rows of
128 bytes and more at least 85 % of the bandwidth of the device's own copy. Memory is read and
written in sectors of 32 bytes. The peer ``copy_`` moves as many bytes as the touched sectors have;
for shorter rows the target is 80 % of its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch

from benchmarks.case import KIB, MIB, Side
from benchmarks.gpu.kernel import bound, copy_of, equal_to, random
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from gpudist.transport.nccl.program import BufferView, CombineJob, Lowered
from gpudist.world.partition import Partition

KINDS = ("pack", "unpack", "add")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}
ROWS = {"4 B": 4, "32 B": 32, "128 B": 128, "1 KiB": KIB, "8 KiB": 8 * KIB, "64 KiB": 64 * KIB}
SECTOR = 32
# Cells of both faces: too many for any cache; fewer for short rows, whose sectors are larger.
CELLS, CELLS_IN_SHORT_ROWS, TINY = 256 * MIB, 64 * MIB, 256 * KIB


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases. Bytes are read and written: the cells twice, or three times if added."""
    found: list[GpuCase] = []
    for kind in KINDS:
        for dtype in DTYPES:
            for name, row_bytes in ROWS.items():
                cells = CELLS if row_bytes >= 128 else CELLS_IN_SHORT_ROWS
                cells = TINY if tiny else cells
                parameters = {"kind": kind, "dtype": dtype, "row": row_bytes, "cells": cells}
                moved = cells * (3 if kind == "add" else 2)
                words = f"{kind} {dtype}, rows of {name}"
                found.append(GpuCase("packing", words, ranks, moved, parameters))
    return found


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    """Return the sides; torch's use slices: ``cat`` of two, or ``copy_`` and ``add_`` into two."""
    kind, row_bytes = case.parameters["kind"], case.parameters["row"]
    dtype = DTYPES[case.parameters["dtype"]]
    width = row_bytes // dtype.itemsize
    pitch = 4 * max(width, SECTOR // dtype.itemsize)
    rows = case.parameters["cells"] // row_bytes
    half, columns = rows // 2, (0, pitch // 2)

    def faces(wide: torch.Tensor) -> list[torch.Tensor]:
        first, second = (slice(column, column + width) for column in columns)
        return [wide[:half, first], wide[half:, second]]

    jobs = [_job(kind, face, half, width, pitch, columns[face]) for face in (0, 1)]
    lowered = Lowered(dtype, after=jobs)
    wide = random((rows, pitch), dtype, P_world.device)
    narrow = random((rows, width), dtype, P_world.device)
    copy = copy_of(_touched(kind, rows, row_bytes), P_world.device)
    if kind == "pack":
        y = torch.empty_like(narrow)
        ours = bound(P_world, lowered, wide, lambda: y)
        is_right = equal_to(torch.cat(faces(wide)))
        theirs: Callable[[], torch.Tensor] = lambda: torch.cat(faces(wide), out=y)  # noqa: E731
        return {
            "gpudist": Side(ours, is_right, lambda: y.fill_(9)),
            "copy_": copy,
            "torch": Side(theirs, is_right, lambda: y.fill_(9)),
        }
    before, target = wide.clone(), wide
    expected = wide.clone()
    combine = torch.Tensor.copy_ if kind == "unpack" else torch.Tensor.add_

    def by_torch(to: torch.Tensor = target) -> torch.Tensor:
        for face, cells in zip(faces(to), (narrow[:half], narrow[half:]), strict=True):
            combine(face, cells)
        return to

    by_torch(expected)
    ours = bound(P_world, lowered, narrow, lambda: target, f"{kind} {dtype} {row_bytes}")
    is_right = equal_to(expected)
    return {
        "gpudist": Side(ours, is_right, lambda: target.copy_(before)),
        "copy_": copy,
        "torch": Side(by_torch, is_right, lambda: target.copy_(before)),
    }


def _job(kind: str, face: int, half: int, width: int, pitch: int, column: int) -> CombineJob:
    in_wide, in_narrow = face * half * pitch + column, face * half * width
    if kind == "pack":
        wide, narrow = (
            BufferView("input", in_wide, (pitch, 1)),
            BufferView("output", in_narrow, (width, 1)),
        )
        return CombineJob((half, width), narrow, (wide,))
    wide, narrow = (
        BufferView("output", in_wide, (pitch, 1)),
        BufferView("input", in_narrow, (width, 1)),
    )
    return CombineJob((half, width), wide, (wide, narrow) if kind == "add" else (narrow,))


def _touched(kind: str, rows: int, row_bytes: int) -> int:
    in_wide = rows * ceil(row_bytes / SECTOR) * SECTOR
    return rows * row_bytes + in_wide * (2 if kind == "add" else 1)
