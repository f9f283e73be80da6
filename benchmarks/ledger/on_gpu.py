"""Compare the ledger with a GPU: the kernels that the driver saw, and memory after a forward.

``python -m benchmarks.ledger.on_gpu`` gives a row per network, converted and sequential, in a world
of one or, with ``--ranks 2``, of two ranks that share the GPU. Their rows have the host's time, but
not a step's, since the kernels of both take turns. ``launches`` are the ledger's and ``kernels``
the driver's: a convolution or a product of torch may launch several. Over the doubles of CUDA there
are none.

Two ranks take NCCL 2.30, named in LD_PRELOAD and GPUDIST_NCCL_LIBRARY, since torch loads its own
one otherwise, and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.ledger.__main__ import read_rows
from benchmarks.ledger.networks import SUBJECTS, Subject
from benchmarks.ledger.step import DTYPES, Case, Step
from gpudist.world.partition import Partition
from tests.gpu.worlds import SHARED, OneRank, SeveralRanks

_WARM_UP, _TIMED = 3, 15
Found = dict[str, Any]


def kernels_of(step: Callable[[], object]) -> Counter[str]:
    """Return how often each kernel, copy and fill of a call ran on the GPU, but for NCCL's."""
    _wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        _wait()
    names = [
        event.name
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return Counter(name for name in names if not name.lower().startswith("nccl"))


def measure(P_world: Partition, name: str, dtype: str, layout: str) -> Found:
    """Return counts of a step of the converted network and of the sequential one. Collective."""
    case = Case(P_world, SUBJECTS[name], dtype, layout)
    found: Found = {"network": name, "ranks": P_world.size, "dtype": dtype, "layout": layout}
    kernels: dict[str, Counter[str]] = {}
    ours, alone = case.steps(case.subject.size)
    steps: dict[str, Step] = {"": ours, "_sequential": alone}
    for suffix, step in steps.items():
        for _ in range(_WARM_UP):
            step()
        kernels[suffix] = kernels_of(step)
        found["kernels" + suffix] = kernels[suffix].total()
        found["held_bytes" + suffix] = _held(step)
    meaningful = ("host_us", "step_us") if P_world.size == 1 else ("host_us",)
    found |= {
        f"{what}{suffix}": times[what]
        for suffix, times in _times(steps).items()
        for what in meaningful
    }
    more = kernels[""] - kernels["_sequential"]
    found["more"] = {name[:80]: count for name, count in more.most_common(12)}
    return found


def _held(step: Step) -> int:
    """Return the bytes that a forward leaves allocated, with its outputs."""
    for parameter in step.network.parameters():
        parameter.grad = None
    _wait()
    before = torch.cuda.memory_allocated()
    loss = step.loss()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held


def _times(steps: dict[str, Step]) -> dict[str, dict[str, float]]:
    """Return medians of the host's time and of the whole time of both, which take turns."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for _ in range(_TIMED):
        for name, step in steps.items():
            _wait()
            start_s = time.perf_counter()
            step()
            enqueued_s = time.perf_counter()
            _wait()
            found[name][0].append(1e6 * (enqueued_s - start_s))
            found[name][1].append(1e6 * (time.perf_counter() - start_s))
    return {
        name: {
            "host_us": round(statistics.median(host)),
            "step_us": round(statistics.median(whole)),
        }
        for name, (host, whole) in found.items()
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    world = OneRank() if options.ranks == 1 else SeveralRanks(_sharing(options.ranks))
    ledger = {(row.network, row.ranks, row.dtype, row.layout): row for row in read_rows()}
    cases = [
        (name, dtype, layout)
        for name, subject in SUBJECTS.items()
        if options.network in name and options.ranks in subject.ranks and _is_there(subject)
        for dtype, layout in zip(DTYPES, (subject.layouts[0], subject.layouts[-1]), strict=True)
    ]
    lines: list[Found] = []
    for name, dtype, layout in track(cases, console=Console(stderr=True), transient=True):
        found = world.run(measure, name=name, dtype=dtype, layout=layout)[0]
        row = ledger.get((name, options.ranks, dtype, layout))
        if row is not None:
            found |= {"launches": row.launches, "launches_sequential": row.launches_sequential}
        lines.append(found)
        text = json.dumps(found)
        print(text if options.json is None else _short(found), flush=True)
        if options.json is not None:
            options.json.write_text(
                "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
            )
    world.close()
    return 0


def _short(found: Found) -> str:
    pairs = (
        f"{what} {found.get(what)} ({found.get(what + '_sequential')})"
        for what in ("launches", "kernels", "held_bytes", "host_us", "step_us")
    )
    case = (str(found[name]) for name in ("network", "ranks", "dtype", "layout"))
    return f"{', '.join(case)}: {', '.join(pairs)}"


def _is_there(subject: Subject) -> bool:
    return not subject.package or find_spec(subject.package.replace("-", "_")) is not None


def _sharing(ranks: int) -> str:
    return next(kind for kind, size in SHARED.items() if size == ranks)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger.on_gpu", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows as JSON lines there")
    parser.add_argument("--network", default="", metavar="TEXT", help="only those so named")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
