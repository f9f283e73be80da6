"""Move the tensors of a batch that get gradients: one operand per dtype."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from gpudist.batch.leaves import TensorSpec
from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import move
from gpudist.geometry.broadcasting import Pairing
from gpudist.ops.broadcast import plan_between
from gpudist.world.partition import Partition


def move_differentiable(
    specs: Sequence[TensorSpec | torch.Tensor],
    tensors: Sequence[torch.Tensor] | None,
    P: Partition,
    root: int,
) -> list[torch.Tensor]:
    """Broadcast the root's tensors that require grad, as one differentiable node.

    Collective over ``P``.

    Args:
        specs: dtype and shape of each tensor, known to all ranks.
        tensors: tensors to broadcast on the root; ``None`` elsewhere.
        P: partition of the workers.
        root: position of the root in ``P``.

    Adjoint:
        The sum of all ranks' gradients, on the root: one packed message for each dtype.
    """
    dtypes = list(dict.fromkeys(spec.dtype for spec in specs))
    counts = [sum(prod(s.shape) for s in specs if s.dtype == dtype) for dtype in dtypes]
    movements = [_broadcast(n, dtype, P, root) for n, dtype in zip(counts, dtypes, strict=True)]
    inputs = [
        torch.empty(0, dtype=dtype, device=P.device, requires_grad=True) if tensors is None
        else torch.cat([x.reshape(-1).to(P.device) for x in tensors if x.dtype == dtype])
        for dtype in dtypes
    ]  # fmt: skip
    flat = dict(zip(dtypes, move(movements, inputs), strict=True))
    starts = dict.fromkeys(dtypes, 0)
    results: list[torch.Tensor] = []
    for spec in specs:
        start, count = starts[spec.dtype], prod(spec.shape)
        results.append(flat[spec.dtype].narrow(0, start, count).view(spec.shape))
        starts[spec.dtype] += count
    return results


def _broadcast(count: int, dtype: torch.dtype, P: Partition, root: int) -> Movement:
    P_root = P.create_partition_inclusive([root])
    P_all = P.create_partition_inclusive(range(P.size))
    pairing = Pairing((1,), (P.size,))
    plan = plan_between(P_root, P_all, P_all, pairing, lambda _: (count,), (count,))
    return bind(plan, P_all, f"broadcast_batch(root={root})", dtype, (0,), dtype)
