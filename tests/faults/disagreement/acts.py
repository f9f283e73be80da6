"""Joint calls of ranks, and disagreements in which one of them calls something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gpudist.exchange import carry_out
from gpudist.ops import HaloExchange
from gpudist.world.partition import Partition
from tests.faults.faults import DISAGREEMENTS, Calls
from tests.faults.operators import OPERATORS, SAME, Meaning, given, line, root_rank

Act = Callable[[Partition, Meaning], Any]


def block(name: str, P: Partition, meaning: Meaning) -> torch.Tensor:
    """This rank's input: of operators with a root a placeholder elsewhere."""
    blocks = OPERATORS[name].blocks(P.size, meaning.nbytes)
    x, *_ = given(blocks)
    if any(each is None for each in blocks):
        x = x if P.rank == root_rank(P, meaning) else x.new_empty((x.shape[0], 0))
    if meaning.has_other_dtype:
        # The matrices are equally wide, so the number of bytes would fit.
        x = x.to(torch.int32 if x.dim() == 2 else torch.float64)
    return x


def operate(name: str, P: Partition, meaning: Meaning) -> torch.Tensor:
    """The operator, with its global shape as this rank means it; of layers backward too."""
    row = OPERATORS[name]
    shape = given(row.blocks(P.size, meaning.nbytes))[0].shape
    grid = row.grid(P.size)
    whole = tuple(n * parts for n, parts in zip(shape, grid, strict=False))
    x = block(name, P, meaning)
    x = x.requires_grad_(x.dim() > 2)
    y = row.on(P, replace(meaning, known={"global_shape": whole}))(x)
    if y.requires_grad:
        y.sum().backward()
    return y


def adjoint_of_halo(P: Partition, meaning: Meaning) -> torch.Tensor:
    x = block("halo_exchange", P, meaning)
    widths = [(2, 2) if meaning.other else (1, 1)]
    whole = (x.shape[0], x.shape[1] * P.size)
    exchange = HaloExchange(line(P, meaning), halo=widths, periodic=True, global_shape=whole)
    movement = exchange.movement(x)
    return carry_out([movement.T], [torch.ones(movement.output_shape, dtype=x.dtype)])[0]


def tell(P: Partition, meaning: Meaning) -> list[list[int]]:
    """Integers of the ranks, as partitions tell them."""
    P_x = line(P, meaning)
    if meaning.has_other_dtype:
        return [P_x.broadcast_data([1, 2, 3])]
    return P_x.allgather_data(range(3 + (meaning.other or meaning.nbytes != SAME.nbytes)))


def _act(name: str) -> Act:
    return lambda P, meaning: operate(name, P, meaning)


ACTS: dict[str, Act] = {
    **{name: _act(name) for name in OPERATORS},
    "adjoint of halo_exchange": adjoint_of_halo,
    "allgather_data": tell,
}
NAMES = list(ACTS)
KINDS = tuple(DISAGREEMENTS)
AGREED = {(name, kind) for name, row in OPERATORS.items() for kind in row.agreed}
RANKS = 3


def ranks_of(name: str) -> int:
    return OPERATORS[name].ranks if name in OPERATORS else RANKS


def follower_of(name: str) -> str:
    """The operator that is called after it, which any number of ranks can call."""
    others = [other for other in NAMES if ranks_of(other) == RANKS or other == name]
    return others[(others.index(name) + 1) % len(others)]


def sequence(name: str, kind: str, is_odd: bool) -> Calls:
    """Return the calls of a rank: the same on all ranks but the odd one."""
    after = follower_of(name)
    return DISAGREEMENTS[kind](name, after) if is_odd else [(name, SAME), (after, SAME)]
