"""A periodic halo of one cell in a world of one, eager and as a graph: copies, no messages.

Targets: at most 1.1 times the device's own copy of as many bytes, plus 5 us; as a graph, 6 us on
the GPU for the smallest.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F

from benchmarks.case import Side
from benchmarks.gpu.kernel import copy_of, equal_to, random
from benchmarks.gpu.machine import Call, Machine
from benchmarks.gpu.measure import GpuCase
from gpudist.ops import HaloExchange
from gpudist.world.partition import Partition

SHAPES = ((1, 1, 32, 32, 32), (1, 16, 512, 512), (1, 4, 256, 256, 256), (1, 16, 4096, 4096))
TINY = ((1, 2, 6, 5, 4), (1, 2, 5, 6))


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are the block and the padded block."""
    return [
        GpuCase(
            "self_halo", f"{name_of(shape)}, {how}", ranks, moved_bytes(shape),
            {"shape": shape, "captured": how == "graph"},
        )
        for shape in (TINY if tiny else SHAPES)
        for how in ("eager", "graph")
    ]  # fmt: skip


def name_of(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def moved_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a float32 block that is read plus those of the padded one written."""
    return 4 * (prod(shape) + prod(shape[:2]) * prod(n + 2 for n in shape[2:]))


def exchange_of(shape: tuple[int, ...], P_world: Partition) -> HaloExchange:
    """Return one cell from both sides of every spatial dim, cut over the ranks in the first dim."""
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size] + [1] * (len(shape) - 3))
    return HaloExchange(P_x, halo=((1, 1),) * (len(shape) - 2), periodic=True)


def padded(x: torch.Tensor) -> torch.Tensor:
    """Pad by torch."""
    return F.pad(x, (1, 1) * (x.dim() - 2), mode="circular")


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    x = random(case.parameters["shape"], torch.float32, P_world.device)
    exchange = exchange_of(case.parameters["shape"], P_world)
    is_right = equal_to(padded(x))
    copy = copy_of(case.bytes, P_world.device)

    def as_asked(call: Call) -> Call:
        return machine.capture(call) if case.parameters["captured"] else call

    return {
        "gpudist": Side(as_asked(lambda: exchange(x)), is_right),
        "copy_": Side(as_asked(copy.call), copy.is_right, copy.clear),
        "torch pad": Side(as_asked(lambda: padded(x)), is_right),
    }
