"""Dropout and random numbers by the index of cells, compared with torch's.

Targets: at most 1.5 times torch's time. The block is read and written once; torch's dropout writes
a mask beside it. Results are compared, bit by bit, with those of the same cells on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import Side
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.self_halo import name_of
from gpudist.geometry.boxes import Box
from gpudist.nn import DistributedDropout
from gpudist.nn.random.cells import Cells, Key, normal_by_index, uniform_by_index
from gpudist.nn.random.drop import drop_by_index
from gpudist.world.partition import Partition

SHAPES = ((1, 32, 128, 128, 128), (1, 1024, 1024))
TINY = ((1, 3, 17, 19), (1, 3, 400))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
P, SEED = 0.1, 7
CPU = torch.device("cpu")
# Cells compared with the CPU's at each end of dim 1; all cells, if they are fewer.
MOST_COMPARED = 1 << 20
Draw = Callable[..., torch.Tensor]
DRAWS: dict[str, tuple[Draw, Draw, float, float]] = {
    "rand_like": (uniform_by_index, torch.rand_like, 0.5, 1 / 12),
    "randn_like": (normal_by_index, torch.randn_like, 0.0, 1.0),
}


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are read and written, in both directions if there are two."""
    found: list[GpuCase] = []
    for shape in TINY if tiny else SHAPES:
        for name, dtype in DTYPES.items():
            for what in ("dropout", "dropout, both ways", *DRAWS):
                passes = {"dropout": 2, "dropout, both ways": 4}.get(what, 1)
                parameters = {"shape": shape, "dtype": dtype, "what": what}
                case = f"{what}, {name_of(shape)}, {name}"
                nbytes = passes * dtype.itemsize * prod(shape)
                found.append(GpuCase("dropout", case, ranks, nbytes, parameters))
                if name == "float32" and prod(shape) <= MOST_COMPARED:
                    found.append(
                        GpuCase("dropout", f"{case}, host", ranks, 0, parameters, clock="enqueue")
                    )
    return found


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    shape, dtype, what = (case.parameters[key] for key in ("shape", "dtype", "what"))
    x, g = (torch.rand(shape, device=P_world.device).add_(0.5).to(dtype) for _ in range(2))
    if what in DRAWS:
        return _draws(what, x)
    layer = DistributedDropout(
        P_world.create_cartesian_topology_partition([1] * len(shape)), P, seed=SEED
    ).to(P_world.device)
    both = what != "dropout"

    def is_right(result: Any) -> bool:
        assert layer.calls is not None
        call = int(layer.calls) - 1
        y, gradient = result if both else (result, None)
        return _is_dropped(y, x, call) and (gradient is None or _is_dropped(gradient, g, call))

    def is_like_torchs(result: Any) -> bool:
        y, gradient = result if both else (result, None)
        return _is_scaled(y, x) and (gradient is None or _is_scaled(gradient, g))

    torchs = lambda x: F.dropout(x, P)  # noqa: E731
    if both:
        return {
            "gpudist": Side(lambda: both_ways(layer, x, g), is_right),
            "F.dropout": Side(lambda: both_ways(torchs, x, g), is_like_torchs),
        }
    return {
        "gpudist": Side(lambda: layer(x), is_right),
        "F.dropout": Side(lambda: torchs(x), is_like_torchs),
    }


@torch.enable_grad()
def both_ways(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, g)[0]


def _draws(what: str, x: torch.Tensor) -> dict[str, Side]:
    by_index, torchs, mean, variance = DRAWS[what]
    shape, key = tuple(x.shape), Key(SEED, 1)
    whole = Cells(Box.whole(shape), shape)

    def is_right(y: torch.Tensor) -> bool:
        expected = lambda part: by_index(key, Cells(part, shape), x.dtype, CPU)  # noqa: E731
        return _has_moments(y) and all(
            torch.equal(y[part.slices].cpu(), expected(part)) for part in _compared(shape)
        )

    def _has_moments(y: torch.Tensor) -> bool:
        wide = y.float()
        off_mean, off_variance = float(wide.mean()) - mean, float(wide.var()) - variance
        # The rounding of bfloat16 shifts the mean of uniform numbers.
        return (
            abs(off_mean) < 6 * (variance / y.numel()) ** 0.5 + 0.003
            and abs(off_variance) < 6 * variance * (2 / y.numel()) ** 0.5 + 0.003
        )

    return {
        "gpudist": Side(lambda: by_index(key, whole, x.dtype, x.device), is_right),
        f"torch.{what}": Side(lambda: torchs(x), _has_moments),
    }


def _compared(shape: tuple[int, ...]) -> list[Box]:
    """Return the boxes that are compared with a CPU's cells: the whole, or both ends of dim 1."""
    if prod(shape) <= MOST_COMPARED:
        return [Box.whole(shape)]
    whole = Box.whole(shape)
    ends = ((0, 1), (shape[1] - 1, shape[1]))
    return [
        Box((0, start, *whole.start[2:]), (whole.stop[0], stop, *whole.stop[2:]))
        for start, stop in ends
    ]


def _is_dropped(y: torch.Tensor, x: torch.Tensor, call: int) -> bool:
    shape = tuple(x.shape)
    return _has_share(y) and all(
        torch.equal(
            y[part.slices].cpu(),
            drop_by_index(x[part.slices].cpu(), Key(SEED, call), Cells(part, shape), P),
        )
        for part in _compared(shape)
    )


def _is_scaled(y: torch.Tensor, x: torch.Tensor) -> bool:
    expected = torch.where(y == 0, 0, x / (1 - P))
    return _has_share(y) and bool(((y - expected).abs() <= 0.02 * expected).all())


def _has_share(y: torch.Tensor) -> bool:
    near = 6 * (P * (1 - P) / y.numel()) ** 0.5
    return abs(float((y == 0).float().mean()) - P) < near
