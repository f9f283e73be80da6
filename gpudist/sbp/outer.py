"""In converted networks, make large results of small plain tensors in blocks.

A network that compares the positions of all tokens with each other, as for a mask, makes a plain
tensor of tokens squared. Every worker would have all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from gpudist.geometry.layout import broadcast, split
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.registry import mapped
from gpudist.sbp.scope import Scope

# Smaller results are not worth the messages that blocks may need later.
FEWEST_CELLS = 1 << 20
# Cells of the result for each cell of the inputs' memory.
_TIMES = 16


def in_blocks(scope: Scope, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of an elementwise function of plain tensors in blocks of rows.

    Rows are the dim before the last one, as of a mask of queries and keys.

    Returns:
        A global tensor, or ``None`` if every worker is to compute the whole result: it is small,
        it is not much larger than its inputs, its rows are fewer than the workers, or an input
        requires grad.
    """
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if len(given) == 1 and 0 not in given[0].stride():
        return None
    if "out" in kwargs or any(type(x) is not torch.Tensor or x.requires_grad for x in given):
        return None
    shape = _broadcast_shape(given)
    cells = prod(shape)
    if cells < FEWEST_CELLS or len(shape) < 2 or cells < _TIMES * sum(map(_cells_in_memory, given)):
        return None
    placement = scope.placement
    if shape[-2] < placement.partition.size:
        return None
    dim = len(shape) - 2
    rows = (split(dim),) * placement.axes

    def block(x: Any) -> Any:
        """Return the rows of ``x`` as a view."""
        if not isinstance(x, torch.Tensor) or not x.dim():
            return x
        own = dim - (len(shape) - x.dim())
        is_cut = own >= 0 and x.shape[own] > 1
        sbp = tuple(split(own) for _ in rows) if is_cut else (broadcast,) * placement.axes
        if placement.index is None:
            return GlobalTensor._wrap(x.reshape(-1)[:0], placement, sbp, tuple(x.shape))
        cells = placement.layout(sbp, tuple(x.shape)).box(placement.index)
        return GlobalTensor._wrap(x[cells.slices], placement, sbp, tuple(x.shape))

    return function(*mapped(args, block), **mapped(kwargs, block))


def _broadcast_shape(given: Sequence[torch.Tensor]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_tensors(*given)[0].shape)
    except RuntimeError:
        return ()  # The function itself says what does not fit.


def _cells_in_memory(x: torch.Tensor) -> int:
    strides = zip(x.shape, x.stride(), strict=True)
    return prod(n for n, stride in strides if stride)
