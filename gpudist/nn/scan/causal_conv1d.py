"""Depthwise causal convolution over a split sequence of packed documents."""

from __future__ import annotations

import torch

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError, ShapeError
from gpudist.nn.affine.local_conv import LocalConvolution
from gpudist.nn.autocast import autocast_is_on
from gpudist.ops.halo_exchange import halo_exchange
from gpudist.ops.operator import cached_operator
from gpudist.ops.shape_agreement import ShapeMode, refuse
from gpudist.world.partition import CartesianPartition


@checked()
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    P_x: CartesianPartition,
    *,
    seq_idx: torch.Tensor | None = None,
    shape: ShapeMode = "static",
) -> torch.Tensor:
    """Convolve each channel of a split sequence with its own kernel over the past.

    Collective over the workers along axis 2 of ``P_x``. Output ``t`` is the bias plus the sum over
    ``j`` of ``weight[:, j]`` times input ``t - (k - 1) + j``; inputs before the first cell are
    zeros. For a layer that has its own parameters and mixes channels, but does not take documents,
    see :class:`~gpudist.nn.DistributedCausalConv1d`.

    Args:
        x: block ``[B, C, T]``; may be uneven or empty.
        weight: kernels of this worker's channels, ``[C, k]``.
        bias: ``[C]``, or ``None``.
        P_x: partition with 3 axes.
        seq_idx: integer block ``[B, T]``, number of the document of each cell, if several are
            packed into a sequence. Outputs do not depend on cells before the last change of the
            number.
        shape: ``"dynamic"`` makes the ranks agree on the blocks at every call, for lengths that
            change.

    Returns:
        New tensor ``[B, C, T]``: this worker's block of the output. A clone of ``x`` on workers
        outside ``P_x``.

    Adjoint:
        Correlation with the same kernels; gradients of received cells are added to the cells they
        were copied from. Workers hold copies of ``weight`` and ``bias``, and each copy gets its own
        part of the gradient. To sum the parts, pass what :func:`gpudist.broadcast` makes of a
        parameter of one worker.

    Cost:
        The ``k - 1`` cells in front of each block and, with ``seq_idx``, their document numbers,
        however long the blocks are. They come from several workers if blocks are shorter.

    Raises:
        PartitionError: on every rank alike, if ``P_x`` does not have 3 axes.
        ShapeError: on every rank alike, if shapes or dtypes of the tensors do not match.
    """
    if P_x.dim != 3:
        raise PartitionError(
            f"causal_conv1d: P_x has shape {list(P_x.shape)}; it needs axes for batch, channels "
            "and sequence"
        )
    if not P_x.active:
        return x.clone()
    problem = _problem(x, weight, bias, seq_idx)
    if problem is not None:
        refuse(P_x, ShapeError(f"causal_conv1d: {problem}; x has shape {list(x.shape)}"))
    line = cached_operator(CartesianPartition.along, P_x, ((2,),))
    length, kernel = x.shape[2], weight.shape[1]
    halo = ((0, 0), (0, 0), (kernel - 1, 0))
    past = halo_exchange(x, line, halo=halo, shape=shape)
    ids = None
    if seq_idx is not None:
        ids = halo_exchange(seq_idx.long().unsqueeze(1), line, halo=halo, shape=shape)
    elif x.numel():
        convolution = LocalConvolution((1,), (0,), (1,), len(weight))
        return convolution(past, weight.unsqueeze(1), bias)

    def back(cells: torch.Tensor, steps: int) -> torch.Tensor:
        """Return the cells that precede those of the output by some steps."""
        stop = cells.shape[2] - steps
        return cells[..., max(0, stop - length) : stop]

    y = weight[:, -1].unsqueeze(-1) * back(past, 0)
    is_same: torch.Tensor | None = None
    for steps in range(1, kernel):
        cells = back(past, steps)
        if ids is not None:
            continues = back(ids, steps) == back(ids, steps - 1)
            is_same = continues if is_same is None else is_same & continues
            cells = torch.where(is_same, cells, 0)
        y = y + weight[:, -1 - steps].unsqueeze(-1) * cells
    return y if bias is None else y + bias.unsqueeze(-1)


def _problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
) -> str | None:
    if x.dim() != 3:
        return "x must have 3 dims, [B, C, T]"
    if weight.dim() != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
        return f"weight must be [{x.shape[1]}, k], but is {list(weight.shape)}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias must be [{x.shape[1]}], but is {list(bias.shape)}"
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if len(dtypes) > 1 and not autocast_is_on(x.device):
        return f"dtypes are {sorted(map(str, dtypes))}; convert weight and bias to {x.dtype}"
    if seq_idx is not None and seq_idx.shape != (x.shape[0], x.shape[2]):
        return f"seq_idx must be [{x.shape[0]}, {x.shape[2]}], but is {list(seq_idx.shape)}"
    return None
