"""Block that consists of copies of another block's cells, without messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gpudist.exchange.autograd import move
from gpudist.exchange.movement import Movement, bind
from gpudist.geometry.copies import MOST_BOXES, plan_copies, runs_of
from gpudist.world.partition import Partition

# In a small dim, runs of single cells are boxes too.
_FEW_RUNS = 8


class Arrangement:
    """Local, differentiable operator; see :func:`bind_arrangement`."""

    def __init__(
        self, movement: Movement | None, gathers: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        self._movement, self._gathers = movement, gathers

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        for dim, cells in self._gathers:
            block = block.index_select(dim, cells)
        return block if self._movement is None else move((self._movement,), (block,))[0]


def bind_arrangement(
    cells: Mapping[int, Sequence[int]],
    shape: Sequence[int],
    P: Partition,
    label: str,
    dtype: torch.dtype,
) -> Arrangement | None:
    """Bind the operator whose cell ``i`` along ``dim`` is a copy of the block's ``cells[dim][i]``.

    Runs of neighbours are copied as boxes, by one movement for all dims; their adjoint is a sum in
    a fixed order, of 16-bit floats in float32. Dims with other orders are gathered cell by cell.

    Args:
        cells: cells of the result by dim, without dims that do not change.
        shape: shape of the block.
        P: partition of this worker.
        label: description of the operator.
        dtype: dtype of the block.

    Returns:
        The operator, ``None`` if the result is the block.
    """
    changed = {d: c for d, c in cells.items() if list(c) != list(range(shape[d]))}
    runs = {dim: runs_of(order) for dim, order in changed.items()}
    few = {
        dim: along
        for dim, along in runs.items()
        if len(along) <= min(MOST_BOXES, max(_FEW_RUNS, len(changed[dim]) // 2))
    }
    many = sorted(changed.keys() - few.keys())
    gathers = [
        (dim, torch.tensor(changed[dim], dtype=torch.int64, device=P.device)) for dim in many
    ]
    after = [len(changed[d]) if d in many else extent for d, extent in enumerate(shape)]
    movement = None
    if few:
        movement = bind(plan_copies(after, few, P.plan_rank), P, label, dtype, (), dtype)
    return Arrangement(movement, gathers) if changed else None
