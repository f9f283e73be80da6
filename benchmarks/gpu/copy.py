"""Copies of a contiguous tensor into existing memory: the device's own, and our kernel's.

The device's own copy is the upper bound. Target: our kernel reaches 85 % of it from 64 MiB on.
Small sizes are copied between several tensors in turn, so that they do not stay in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch

from benchmarks.case import KIB, MIB, Side
from benchmarks.gpu.kernel import bound, random
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from gpudist.transport.nccl.program import BufferView, CombineJob, Lowered
from gpudist.world.partition import Partition

SIZES = {"1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB}
SIZES["1 GiB"] = 1024 * MIB
TINY = {"1 KiB": KIB, "4 KiB": 4 * KIB}
# Bytes read and written in turn: several times the size of a GPU's cache.
TOGETHER = 512 * MIB
MOST_TENSORS = 64


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are read and written."""
    sizes = TINY if tiny else SIZES
    return [GpuCase("copy", name, ranks, 2 * n, {"bytes": n}) for name, n in sizes.items()]


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    nbytes = case.parameters["bytes"]
    number = max(1, min(MOST_TENSORS, TOGETHER // (2 * nbytes)))
    sources = [random((nbytes,), torch.uint8, P_world.device) for _ in range(number)]
    targets = [torch.empty_like(source) for source in sources]
    job = CombineJob((nbytes,), BufferView("output", 0, (1,)), (BufferView("input", 0, (1,)),))
    pairs = list(zip(sources, targets, strict=True))

    def ours(source: torch.Tensor, target: torch.Tensor) -> Callable[[], torch.Tensor]:
        return bound(P_world, Lowered(torch.uint8, after=[job]), source, lambda: target)

    def the_devices(source: torch.Tensor, target: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: target.copy_(source)

    def side(make: Callable[..., Callable[[], torch.Tensor]]) -> Side:
        calls = cycle([make(*pair) for pair in pairs])

        def is_right(result: torch.Tensor) -> bool:
            number = next(i for i, target in enumerate(targets) if target is result)
            return torch.equal(result, sources[number])

        return Side(lambda: next(calls)(), is_right, lambda: [t.zero_() for t in targets])

    return {"gpudist": side(ours), "copy_": side(the_devices)}
