"""Parameters of distributed layers: drawn as the sequential layer's, kept by one owner each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box
from gpudist.geometry.broadcasting import Pairing
from gpudist.ops.broadcast import plan_between
from gpudist.world.partition import CartesianPartition

_CHUNK_CELLS = 1 << 22


def kaiming_bound(fan_in: int) -> float:
    """Half-width of the uniform distribution torch draws conv and linear weights from."""
    gain = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    return math.sqrt(3.0) * (gain / math.sqrt(fan_in)) if fan_in > 0 else 0.0


def bias_bound(fan_in: int) -> float:
    """Half-width of the uniform distribution torch draws conv and linear biases from."""
    return 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0


def uniform_parameter(
    shape: Sequence[int],
    bound: float,
    box: Box | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.nn.Parameter:
    """This worker's box of a parameter drawn from ``[-bound, bound)``; see `_drawn_parameter`.

    Args:
        shape: of the whole parameter.
        bound: half-width of the distribution.
        box: what this worker owns, or ``None``.
        device, dtype: as torch's factories.
    """
    return _drawn_parameter(shape, lambda x: x.uniform_(-bound, bound), box, device, dtype)


def normal_parameter(
    shape: Sequence[int],
    box: Box | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.nn.Parameter:
    """This worker's box of a parameter drawn with mean 0 and variance 1; see `_drawn_parameter`.

    Args:
        shape: of the whole parameter.
        box: what this worker owns, or ``None``.
        device, dtype: as torch's factories.
    """
    return _drawn_parameter(shape, lambda x: x.normal_(), box, device, dtype)


def _drawn_parameter(
    shape: Sequence[int],
    draw: Callable[[torch.Tensor], torch.Tensor],
    box: Box | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> torch.nn.Parameter:
    """This worker's box of a parameter that ``draw`` fills; a placeholder without one.

    Every worker draws the whole parameter, a few rows at a time, so that all generators advance
    alike and the values are those of the sequential layer under the same seed.
    """
    # Sizes that no tensor has are refused on all workers, and what has no room before it is drawn.
    torch.empty(tuple(shape), dtype=dtype, device="meta")
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
    """Ranges of rows to draw one after the other.

    Torch draws normal numbers 16 at a time on a CPU, and fewer than 16 in another way: all chunks
    but the last have a multiple of 16 cells, and the last has 16 at least.
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
    parameter: torch.Tensor,
    P_owner: CartesianPartition,
    P_use: CartesianPartition,
    cut: Decomposition,
    name: str,
    axes: Sequence[int] | None = None,
) -> Movement:
    """The broadcast of a parameter's blocks from their owners to the workers that use them.

    Args:
        parameter: this worker's block, or the placeholder for it.
        P_owner, P_use: own the blocks, and use them.
        cut: of the whole parameter into blocks.
        name: of the parameter, the same on all ranks.
        axes: of ``P_owner``, the one that cuts each dim; dim after dim unless given.
    """
    P_both = P_owner.create_partition_union(P_use)
    cutting = range(len(cut.dims)) if axes is None else axes

    def shape_of(rank: int) -> tuple[int, ...]:
        index = P_owner.cartesian_index(rank)
        return cut.block([index[axis] for axis in cutting]).shape

    pairing = Pairing(P_owner.shape, P_use.shape)
    plan = plan_between(P_owner, P_use, P_both, pairing, shape_of, (name, cut))
    label = f"broadcast of the {name} {list(P_owner.shape)} -> {list(P_use.shape)}"
    return bind(plan, P_both, label, parameter.dtype, parameter.shape, parameter.dtype)


def tied_empty(
    shape: Sequence[int],
    dtype: torch.dtype,
    block: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output ``block * weight + bias`` of a layer that has no cells on this rank.

    Depends on its inputs as an output with cells does, so that backward and double backward run on
    this rank too, and know of the same gradients.
    """

    def no_cells(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1)[:0].to(dtype)

    y = no_cells(block) if weight is None else no_cells(block) * no_cells(weight)
    return (y if bias is None else y + no_cells(bias)).view(tuple(shape))


def zero_bias(placeholder: torch.Tensor, channels: int) -> torch.Tensor:
    """A bias of zeros where another worker adds the bias; depends on the placeholder for it."""
    return placeholder.new_zeros(channels) + placeholder.sum()
