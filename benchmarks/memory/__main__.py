"""Predict the peak memory of training steps, and measure it.

    python -m benchmarks.memory predict
    python -m benchmarks.memory measure
    python -m benchmarks.memory page

``predict`` writes ``predicted.json``, which was committed before ``measure`` wrote
``measured.json``. ``page`` writes RESULTS.md from both, and from the steps measured on one H200.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn
from torch.utils._pytree import tree_leaves

import gpudist
from benchmarks.environment import ROOT
from benchmarks.ledger.networks import SUBJECTS
from benchmarks.memory.page import HERE, write_page
from benchmarks.resident import forget_peak, status_mib
from benchmarks.worlds import NEW
from examples.gpt import GPT, Sizes
from examples.networks import UNet3d
from gpudist.exchange.tracing import Watching
from gpudist.planning import profile_of
from gpudist.planning.live_bytes import LiveBytes
from gpudist.planning.rehearsal import DryNetwork
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

RANKS = 2
MIB = 1 << 20
H200_SIDES = (32, 64, 128)


@dataclass(frozen=True)
class Case:
    """A network, the global shape of its input, the grid, and the optimizer."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    optimizer: str
    dtype: torch.dtype = torch.float32
    words: int = 50

    def input(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an input of this shape."""
        if self.dtype == torch.int64:
            return torch.randint(self.words, shape)
        return torch.randn(shape)


def _ledger(name: str, shape: tuple[int, ...], grid: tuple[int, ...], optimizer: str) -> Case:
    subject = SUBJECTS[name]
    dtype = torch.float32 if subject.inputs else torch.int64
    size = shape[2:] if subject.inputs else shape[1:]

    def make() -> nn.Module:
        network = subject.make(size)
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return network

    return Case(make, shape, grid, optimizer, dtype)


CASES = {
    "U-Net 3-D": Case(lambda: UNet3d(1, 3, 8), (1, 1, 64, 64, 64), (1, 1, 2, 1, 1), "adam"),
    "ResNet-50": _ledger("ResNet-50", (2, 3, 224, 224), (1, 1, 2, 1), "momentum"),
    "Swin": _ledger("Swin", (4, 3, 224, 112), (1, 1, 2, 1), "adamw"),
    "ViT": _ledger("ViT", (16, 3, 128, 128), (2, 1, 1, 1), "adamw"),
    "GPT": Case(lambda: GPT(Sizes(500, 128, 128, 4, 4)), (16, 128), (2, 1), "adam", torch.int64),
    "PlainConvUNet": _ledger("PlainConvUNet", (2, 1, 64, 64, 64), (1, 1, 2, 1, 1), "sgd"),
}  # fmt: skip


def predicted(names: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the predictions of cases on the host, and of the U-Net of an H200."""
    host = replace(profile_of("h200"), wire="host")
    for name in names:
        case = CASES[name]
        x = torch.empty(case.shape, dtype=case.dtype, device="meta")
        dry = DryNetwork(case.make(), x, host, True, case.optimizer)
        memory = max((dry.rehearse(case.grid, r).memory for r in range(RANKS)),
                     key=lambda one: one.total)  # fmt: skip
        yield name, {"total": memory.total, **asdict(memory)}
    for side in H200_SIDES:
        dry = DryNetwork(
            UNet3d(1, 3, 16), (1, 1, side, side, side), profile_of("h200"), True, "sgd"
        )
        memory = dry.rehearse((1,) * 5, 0).memory
        yield f"H200, {side}^3", {"total": memory.total, **asdict(memory)}


class _Tensors(Watching):
    """Mode that follows the storages of all tensors that operations read or make.

    Under a mode of torch that records, layers would compute in steps that torch can differentiate,
    and keep more tensors than they do in training.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                self._live.add(x)
        return result


def step(P_world: Partition, name: str) -> tuple[int, float]:
    """Return the bytes of live tensors at most, and the increase of the resident MiB."""
    case = CASES[name]
    torch.manual_seed(0)
    before_mib = status_mib("VmRSS")
    P_x = P_world.create_cartesian_topology_partition(case.grid)
    network = gpudist.distribute(case.make(), P_x)
    kinds = {
        "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD,
        "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    }  # fmt: skip
    optimizer: Any = kinds[case.optimizer](network.parameters(), lr=1e-3)
    # Equal blocks would be refused: they may be one tensor that every rank has.
    torch.manual_seed(P_world.rank or 0)
    x = case.input(tuple(n // parts for n, parts in zip(case.shape, case.grid, strict=True)))

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        parts = [y for y in tree_leaves(network(x)) if isinstance(y, torch.Tensor)]
        _loss(parts).backward()
        optimizer.step()

    forget_peak()
    run()
    live = LiveBytes()
    for y in tree_leaves(
        ([*network.parameters()], [*network.buffers()], x, optimizer.state_dict())
    ):
        if isinstance(y, torch.Tensor):
            y = y.to_local() if isinstance(y, gpudist.GlobalTensor) else y
            live.add(y)
    optimizer.zero_grad(set_to_none=True)
    with _Tensors(live):
        run()
    return live.peak_bytes, status_mib("VmHWM") - before_mib


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    y: Any = outputs.pop()
    y = y.to_local() if isinstance(y, gpudist.GlobalTensor) else y
    y = y.flatten(0, -2) if y.dim() == 3 else y
    labels = torch.randint(y.shape[1], (y.shape[0], *y.shape[2:]))
    return F.cross_entropy(y, labels)


def measured(name: str) -> dict[str, Any]:
    """Measure a case in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **NEW.environment}
    command = [sys.executable, "-m", "benchmarks.memory", "world", name]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("what", choices=("predict", "measure", "page", "world"))
    parser.add_argument("names", nargs="*", help="networks; by default all")
    options = parser.parse_args()
    what, names = options.what, options.names
    if what == "world":
        # Ranks import it by the name of this module.
        from benchmarks.memory.__main__ import step as named

        peaks = run_distributed(named, RANKS, names[0], transport="host", timeout=500.0)
        live, resident = (max(one[k] for one in peaks) for k in (0, 1))
        print(json.dumps({"live": live, "resident": int(resident * MIB)}))
        return 0
    if what == "page":
        write_page()
        return 0
    path = HERE / ("predicted.json" if what == "predict" else "measured.json")
    found = json.loads(path.read_text()) if path.is_file() else {}
    names = names or list(CASES)
    results = predicted(names) if what == "predict" else ((n, measured(n)) for n in names)
    for name, one in track(results, total=len(names), transient=True):
        found[name] = one
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
