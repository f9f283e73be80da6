"""Bodies that move messages as large as networks do, eagerly and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpudist.cli.self_check import cases
from gpudist.ops import HaloExchange, Repartition
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.gpu.streams import recorded

ITEM_BYTES = 8
COLUMNS = 1024
# A tensor of 5 dims, whose periodic halo has a box for each of 3 to the 4th directions.
MANY_BOXES = (1, 3, 4, 5, 6)


def every_operator(P_world: Partition, nbytes: int) -> list[str]:
    """Every operator with messages of ``nbytes`` is right at two calls, and so is its adjoint.

    Returns:
        The operators with a wrong cell.
    """
    halos = _cases(P_world, rows=nbytes // ITEM_BYTES // 2, columns=2 * P_world.size)
    others = _cases(P_world, rows=nbytes // ITEM_BYTES // COLUMNS * P_world.size, columns=COLUMNS)
    wrong: list[str] = []
    for name, (of_faces, of_blocks) in {n: (halos[n], others[n]) for n in others}.items():
        case = of_faces() if "halo" in name else of_blocks()
        for call in (1, 2):
            if not case.is_exact(case.operator(case.x)):
                wrong.append(f"{name}, call {call}")
        assert_adjoint(case.operator, case.x, P_world)
    return wrong


def _cases(P_world: Partition, rows: int, columns: int) -> dict[str, Callable]:
    return dict(cases(P_world, max(1, rows), columns))


class Movement(NamedTuple):
    """An operator on this rank, its input and cotangent, and what must come of them."""

    operator: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    cotangent: torch.Tensor
    y: torch.Tensor
    gradient: torch.Tensor


def rows_to_columns(P_world: Partition, extent: int) -> Movement:
    """A square matrix, of which every message is a block of both cuts."""
    P_x = P_world.create_cartesian_topology_partition([P_world.size, 1])
    P_y = P_world.create_cartesian_topology_partition([1, P_world.size])
    values, cotangents = (_whole((extent, extent), seed, P_world.device) for seed in (0, 1))
    rank = P_world.rank or 0
    rows, columns = (torch.tensor_split(values, P_world.size, dim)[rank] for dim in (0, 1))
    gradient = torch.tensor_split(cotangents, P_world.size, 0)[rank]
    cotangent = torch.tensor_split(cotangents, P_world.size, 1)[rank]
    operator = Repartition(P_x, P_y)
    return Movement(operator, rows.clone(), cotangent.contiguous(), columns, gradient)


def three_dimensional_halo(P_world: Partition, extent: int) -> Movement:
    """A cube on each rank, of which a face goes to the rank before and to that after."""
    n, rank = P_world.size, P_world.rank or 0
    P_x = P_world.create_cartesian_topology_partition([n, 1, 1])
    padded = F.pad(_whole((n * extent, extent, extent), 0, P_world.device), (1,) * 6)
    cotangents = [_whole((extent + 2,) * 3, 1 + r, P_world.device) for r in range(n)]
    total = torch.zeros_like(padded)
    for r in range(n):
        total[r * extent : (r + 1) * extent + 2] += cotangents[r]
    mine = slice(rank * extent, (rank + 1) * extent + 2)
    inner = (slice(1, -1),) * 3
    x = padded[mine][inner].clone()
    operator = HaloExchange(P_x, halo=((1, 1),) * 3)
    return Movement(operator, x, cotangents[rank], padded[mine], total[mine][inner])


MOVEMENTS: dict[str, Callable[[Partition, int], Movement]] = {
    "repartition": rows_to_columns,
    "3-D halo": three_dimensional_halo,
}


def compared(P_world: Partition, case: str, extent: int, captured: bool) -> list[str]:
    """Output and gradient of three calls, or of three replays of both together.

    Returns:
        What is wrong, and how many cells of it.
    """
    made = MOVEMENTS[case](P_world, extent)
    x = made.x.clone().requires_grad_()

    def both_ways() -> tuple[torch.Tensor, torch.Tensor]:
        y = made.operator(x)
        (gradient,) = torch.autograd.grad(y, x, made.cotangent)
        return y.detach(), gradient

    call = recorded(both_ways, P_world.device, rehearsed=True) if captured else both_ways
    wrong: list[str] = []
    for turn in range(1, 4):
        with torch.no_grad():
            x.copy_(made.x * turn)
        y, gradient = call()
        for name, found, expected in (
            ("output", y, made.y * turn),
            ("gradient", gradient, made.gradient),
        ):
            cells = int((found != expected).sum())
            if cells:
                wrong.append(f"{name} {turn}: {cells} of {expected.numel()} cells")
    return wrong


def _whole(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    cells = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=device)
    return (cells * 31 + seed * 17).remainder_(251).float().view(shape)


def table_beside_others(P_world: Partition) -> list[int]:
    """Replay graphs whose operators no longer exist, after others like them came and went.

    Their boxes take more than the 16 KiB of a launch's arguments.


    Returns:
        The replays with a wrong cell.
    """
    P_x = P_world.create_cartesian_topology_partition([1] * len(MANY_BOXES))
    x = torch.zeros(MANY_BOXES, device=P_world.device)
    values = _whole(MANY_BOXES, 0, P_world.device)
    replay = _recorded_halo(P_world, x, 1)
    wrong: list[int] = []
    for turn in range(1, 4):
        P_world.wire.remembered.clear()
        for width in (1, 2):
            other = HaloExchange(P_x, halo=((0, 0), *((width, turn),) * 4), periodic=True)
            other(values.repeat(1, turn, 1, 1, 1))
        x.copy_(values * turn)
        y = replay()
        expected = values * turn
        for dim in range(1, len(MANY_BOXES)):
            first, last = expected.narrow(dim, 0, 1), expected.narrow(dim, -1, 1)
            expected = torch.cat((last, expected, first), dim)
        if not torch.equal(y, expected):
            wrong.append(turn)
    return wrong


def _recorded_halo(P_world: Partition, x: torch.Tensor, width: int) -> Callable:
    P_x = P_world.create_cartesian_topology_partition([1] * x.dim())
    operator = HaloExchange(P_x, halo=((0, 0), *((width, width),) * (x.dim() - 1)), periodic=True)
    return recorded(lambda: operator(x), x.device, rehearsed=True)
