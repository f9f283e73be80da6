"""Dropout: the same cells are dropped whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.autograd import all_reduce_constant
from gpudist.nn.random_cells import kept_by_index
from gpudist.sbp.attributes import broadcast, partial_sum, split
from gpudist.sbp.registry import Call, Signature, Where, forms, register


@register(*forms("dropout"), replicable=False, any_cuts=True)
def dropout(call: Call, parts: int) -> list[Signature]:
    """Whatever the input has, the result has too.

    A call draws one number from torch's default generator on the CPU; that of the first worker
    counts, 8 bytes from it to all. So ``torch.manual_seed`` and checkpointing repeat the cells.
    """
    if call.get(3, "inplace", False):
        raise NotImplementedError("dropout: inplace is not supported by global tensors")
    p = call.get(1, "p", 0.5)
    run = _dropout if call.get(2, "training", True) and 0 < p < 1 else None
    ones = (*(split(d) for d in range(call.tensors[0].dims)), partial_sum, broadcast)
    return [Signature((one,), (one,), run=run) for one in ones]


def _dropout(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    (x,), P = tensors, where.P
    p = call.get(1, "p", 0.5)
    number = torch.randint(1 << 62, (1,))
    number = (number if P.rank == 0 else torch.zeros_like(number)).to(x.device)
    seed = all_reduce_constant(number, P, "sum")[0]
    call_number = torch.zeros((), dtype=torch.int64, device=x.device)
    shape = where.call.tensors[0].shape
    kept = kept_by_index(seed, call_number, where.inputs[0], shape, p, x.device)
    return x * kept * (1 / (1 - p))
