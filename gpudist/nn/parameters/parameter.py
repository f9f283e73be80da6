"""Parameters of distributed layers: initial values of the sequential layer, one owner per block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from gpudist.checks.storage import on_meta
from gpudist.exchange import Movement, bind
from gpudist.geometry.boxes import Box
from gpudist.geometry.broadcasting import Pairing
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.ops.broadcast import plan_between
from gpudist.world.partition import Partition

_CHUNK_CELLS = 1 << 22


def kaiming_bound(fan_in: int) -> float:
    """Return the half-width of the uniform distribution of torch's conv and linear weights."""
    gain = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    return math.sqrt(3.0) * (gain / math.sqrt(fan_in)) if fan_in > 0 else 0.0


def bias_bound(fan_in: int) -> float:
    """Return the half-width of the uniform distribution of torch's conv and linear biases."""
    return 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0


def uniform_parameter(
    shape: Sequence[int],
    bound: float,
    box: Box | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.nn.Parameter:
    """Return this worker's box of a parameter drawn from ``[-bound, bound)``.

    See :func:`_draw_parameter`.

    Args:
        shape: global shape of the parameter.
        bound: half-width of the distribution.
        box: box that this worker owns, or ``None``.
        device, dtype: device and dtype of the parameter, as in torch.
    """
    return _draw_parameter(shape, lambda x: x.uniform_(-bound, bound), box, device, dtype)


def normal_parameter(
    shape: Sequence[int],
    box: Box | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.nn.Parameter:
    """Return this worker's box of a parameter drawn from a standard normal distribution.

    See :func:`_draw_parameter`.

    Args:
        shape: global shape of the parameter.
        box: box that this worker owns, or ``None``.
        device, dtype: device and dtype of the parameter, as in torch.
    """
    return _draw_parameter(shape, lambda x: x.normal_(), box, device, dtype)


def _draw_parameter(
    shape: Sequence[int],
    draw: Callable[[torch.Tensor], torch.Tensor],
    box: Box | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> torch.nn.Parameter:
    """Return this worker's box of a parameter drawn by ``draw``; without a box, a placeholder.

    Every worker draws the full parameter, a few rows at a time. So all generators advance by the
    same amount, and the values equal those of the sequential layer under the same seed.
    """
    # Invalid sizes fail on all workers, and lack of memory fails before drawing.
    on_meta("a parameter", shape, dtype)
    block = torch.empty(box.shape if box is not None else (0,), dtype=dtype, device=device)
    for start, stop in _chunks(shape[0], math.prod(shape[1:])):
        chunk = draw(torch.empty((stop - start, *shape[1:]), dtype=dtype, device=device))
        if box is not None:
            first, last = max(box.start[0], start), min(box.stop[0], stop)
            if first < last:
                cells = (slice(first - start, last - start), *box.slices[1:])
                block[first - box.start[0] : last - box.start[0]] = chunk[cells]
    return torch.nn.Parameter(block)


def _chunks(rows: int, row_cells: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows to draw one after the other.

    On a CPU, torch draws normal numbers 16 at a time, and fewer than 16 by another method.
    Therefore all chunks but the last have a multiple of 16 cells, and the last has at least 16.
    """
    unit = 16 // math.gcd(16, row_cells)
    step = max(unit, _CHUNK_CELLS // max(1, row_cells) // unit * unit)
    start = 0
    while start < rows:
        stop = min(rows, start + step)
        if (rows - stop) * row_cells < 16:
            stop = rows
        yield start, stop
        start = stop


def bind_parameter(
    owners: ParameterPlacement,
    P_use: Partition,
    dtype: torch.dtype,
    name: str,
    P_all: Partition | None = None,
) -> Movement:
    """Bind the broadcast of a parameter's blocks from their owners to the workers that use them.

    Args:
        owners: placement of the blocks.
        P_use: partition of the workers that use the blocks.
        dtype: dtype of the parameter.
        name: name of the parameter, the same on all ranks.
        P_all: partition of all these workers; by default the owners, followed by the others.
    """
    P_owner = owners.P
    P_all = P_all or P_owner.create_partition_union(P_use)
    plan = plan_between(
        P_owner, P_use, P_all, Pairing(P_owner.shape, P_use.shape),
        lambda rank: owners.box(rank).shape, (name, owners.sbp, owners.shape),
    )  # fmt: skip
    label = f"broadcast of the {name} {list(P_owner.shape)} -> {list(P_use.shape)}"
    return bind(plan, P_all, label, dtype, owners.own_shape, dtype)


def empty_output(
    shape: Sequence[int],
    dtype: torch.dtype,
    block: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output ``block * weight + bias`` of a layer without cells on this rank.

    It depends on its inputs like an output with cells, so that backward and double backward also
    run on this rank, with the same set of gradients.
    """

    def no_cells(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1)[:0].to(dtype)

    y = no_cells(block) if weight is None else no_cells(block) * no_cells(weight)
    return (y if bias is None else y + no_cells(bias)).view(tuple(shape))


def zero_bias(placeholder: torch.Tensor, channels: int) -> torch.Tensor:
    """Return zeros that depend on the placeholder, for a worker that does not add the bias."""
    return placeholder.new_zeros(channels) + placeholder.sum()
