"""Split channels of a convolution: broadcast the input, convolve, sum-reduce the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.halo import needed_range
from gpudist.geometry.windows import Window
from gpudist.nn.affine.affine_placement import AffinePlacement
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.shape_agreement import BlockLayout


def bind_haloed_broadcast(
    placed: AffinePlacement,
    layout: BlockLayout,
    halo_exchange: HaloExchange,
    halo: Movement,
    x: torch.Tensor,
) -> Movement:
    """Bind the broadcast of the input with its ghosts from ``P_x`` to the convolving workers.

    ``halo`` is the movement that gathers the ghosts.
    """
    inputs, windows = layout.decomposition, halo_exchange.halo.windows

    def haloed(rank: int) -> tuple[int, ...]:
        index = placed.P_x.cartesian_index(rank)
        ranges = [
            needed_range(blocks, window, i)
            for blocks, window, i in zip(inputs.dims, windows, index, strict=True)
        ]
        return tuple(stop - start for start, stop in ranges)

    placeholder = halo.output_shape, halo.output_dtype
    return placed.bind_broadcast(haloed, ("haloed", inputs, windows), layout.dtype, placeholder, x)


def require_input_channels(name: str, inputs: Decomposition, in_channels: int) -> None:
    """Raise if the input's channels differ from the weight's in number or blocks."""
    channels = inputs.dims[1]
    if channels.extent != in_channels:
        raise ShapeError(
            f"{name}, dim 1: the input has {channels.extent} channels, not {in_channels}"
        )
    if channels != Blocks(in_channels, channels.parts):
        raise ShapeError(
            f"{name}, dim 1: the input's blocks have {list(channels.lengths)} channels but the "
            f"weight needs {in_channels} in balanced blocks; repartition the input"
        )


def output_shapes(
    placed: AffinePlacement,
    inputs: Decomposition,
    windows: Sequence[Window],
    out_channels: int,
) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function from the index of a convolving worker to the shape of its output.

    Args:
        placed: placement of the layer.
        inputs: decomposition of its input.
        windows: windows of the layer, one per dim of the input.
        out_channels: global number of output channels.
    """
    channels = Blocks(out_channels, placed.parts[0])
    split_channels = placed.P_sum is not None
    features = [
        window.outputs(blocks) for blocks, window in zip(inputs.dims[2:], windows[2:], strict=True)
    ]

    def shape_of(index: Sequence[int]) -> tuple[int, ...]:
        batch = inputs.dims[0].length(0 if split_channels else index[0])
        return (
            batch,
            channels.length(index[0] if split_channels else 0),
            *(blocks.length(i) for blocks, i in zip(features, index[2:], strict=True)),
        )

    return shape_of
