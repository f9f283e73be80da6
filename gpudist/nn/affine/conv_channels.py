"""Split channels of a convolution: broadcast the input, convolve, sum-reduce the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.broadcasting import Pairing
from gpudist.geometry.halo import needed_range
from gpudist.geometry.windows import Window
from gpudist.nn.affine.conv_placement import ConvPlacement
from gpudist.ops.broadcast import plan_between
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import placeholder_shape
from gpudist.ops.shape_agreement import BlockLayout


def bind_broadcast(
    placed: ConvPlacement,
    layout: BlockLayout,
    halo_exchange: HaloExchange,
    halo: Movement,
    x: torch.Tensor,
) -> Movement:
    """Bind the broadcast of the input with its ghosts from ``P_x`` to the convolving workers.

    ``halo`` is the movement that gathers the ghosts.
    """
    inputs, windows = layout.decomposition, halo_exchange.windows
    P_x, P_c = placed.P_source, placed.P_c
    assert P_x is not None

    def haloed(rank: int) -> tuple[int, ...]:
        index = placed.P_x.cartesian_index(rank)
        ranges = [
            needed_range(blocks, window, i)
            for blocks, window, i in zip(inputs.dims, windows, index, strict=True)
        ]
        return tuple(stop - start for start, stop in ranges)

    P_both = P_x.create_partition_union(P_c)
    plan = plan_between(
        P_x, P_c, P_both, Pairing(P_x.shape, P_c.shape), haloed, ("haloed", inputs, windows)
    )  # fmt: skip
    label = f"broadcast {list(P_x.shape)} -> {list(P_c.shape)}"
    empty = placeholder_shape(x)
    return bind(plan, P_both, label, layout.dtype, halo.output_shape, halo.output_dtype, empty)


def bind_sum(
    placed: ConvPlacement,
    layout: BlockLayout,
    key: tuple[object, ...],
    shape_of: Callable[[Sequence[int]], tuple[int, ...]],
    broadcast: Movement,
    x: torch.Tensor,
) -> Movement:
    """Bind the sum-reduce of the outputs over blocks of input channels, into ``P_y``.

    Args:
        placed: placement of the layer.
        layout: layout of its input.
        key: hashable values that determine the shapes of the outputs.
        shape_of: function from the index of a convolving worker to the shape of its output.
        broadcast: movement of the input to the convolving workers.
        x: block of the input, or its placeholder.
    """
    P_y, P_c = placed.P_sum, placed.P_c
    assert P_y is not None
    P_both = P_y.create_partition_union(P_c)
    plan = plan_between(
        P_y, P_c, P_both, Pairing(P_y.shape, P_c.shape),
        lambda rank: shape_of(P_y.cartesian_index(rank)), key,
    ).T  # fmt: skip
    label = f"sum_reduce {list(P_c.shape)} -> {list(P_y.shape)}"
    shape, dtype = broadcast.output_shape, broadcast.output_dtype
    return bind(plan, P_both, label, layout.dtype, shape, dtype, placeholder_shape(x))


def require_input_channels(name: str, inputs: Decomposition, in_channels: int) -> None:
    """Raise if the input's channels differ from the weight's in number or blocks."""
    channels = inputs.dims[1]
    if channels.extent != in_channels:
        raise ShapeError(
            f"{name}, dim 1: the input has {channels.extent} channels, not {in_channels}"
        )
    if channels != Blocks(in_channels, channels.parts):
        sizes = [channels.length(i) for i in range(channels.parts)]
        raise ShapeError(
            f"{name}, dim 1: the input's blocks have {sizes} channels but the weight needs "
            f"{in_channels} in balanced blocks; repartition the input"
        )


def output_shapes(
    placed: ConvPlacement,
    inputs: Decomposition,
    windows: Sequence[Window],
    channels: Blocks,
) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function from the index of a convolving worker to the shape of its output.

    Args:
        placed: placement of the layer.
        inputs: decomposition of its input.
        windows: windows of the layer, one per dim of the input.
        channels: blocks of the output channels.
    """
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
