"""Result files of a GPU: the machine, and the rows measured there."""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.files import ENVIRONMENT, lines_of
from benchmarks.gpu.measure import GpuRow
from gpudist.world.environment import describe
from gpudist.world.runtime import settings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
UNKNOWN = "unknown"


def path_of(subject: str, ranks: int, folder: Path = RESULTS) -> Path:
    """Return the path of a subject's rows."""
    return folder / f"gpu-{subject}{f'-{ranks}ranks' if ranks > 1 else ''}.jsonl"


def machine(commit: str, ranks: int = 1) -> dict[str, str]:
    """Describe the machine and software of a measurement."""
    found = describe()
    here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
    return {
        "gpu": _gpu(),
        "ranks": f"{ranks}, {here} a node",
        "links": "; ".join(f"{x.first}-{x.second} {x.kind}" for x in found.links) or UNKNOWN,
        "driver": _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda or UNKNOWN,
        "cuda of the core": found.cuda.compiler if found.cuda is not None else UNKNOWN,
        "torch": torch.__version__,
        "nccl": found.nccl.version if found.nccl is not None else UNKNOWN,
        "gpudist": found.gpudist,
        "commit": commit or _said_by("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _gpu() -> str:
    if settings().device_library:
        return "none: a rehearsal over test doubles"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else UNKNOWN


def read(path: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Read the machine and the rows."""
    (_, first), *lines = lines_of(path)
    return first[ENVIRONMENT], [line for _, line in lines]


def line_of(row: GpuRow) -> str:
    """Return a row as text in columns of fixed width."""
    mark = "" if row.correct else "  WRONG"
    # Between GPUs the bandwidth of the links counts.
    moved_gbps = row.busbw_gbps if row.ranks > 1 and row.busbw_gbps is not None else row.gbps
    gbps = "" if moved_gbps is None else f"{moved_gbps:.0f} GB/s"
    peer_us = "" if row.peer_us_median is None else f"{row.peer_us_median:.1f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return (
        f"{row.subject:<16}{row.case:<48}{row.us_median:>11.1f} us {gbps:>10}  "
        f"{row.peer:<36}{peer_us:>11}{ratio:>8}{mark}"
    )


def _said_by(*command: str) -> str:
    """Return the first line a program prints, if the program exists and succeeds."""
    if shutil.which(command[0]) is None:
        return UNKNOWN
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return UNKNOWN
    lines = ended.stdout.splitlines()
    return lines[0].strip() if ended.returncode == 0 and lines else UNKNOWN
