"""Decide whether a windowed layer uses its block in place, without copying it to its ghosts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from gpudist.exchange import Movement, bind
from gpudist.geometry.halo import have_faces, own_paddings, plan_faces
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.shape_agreement import BlockLayout

# Measured with one thread: computing the faces separately costs more than copying a block of
# 256 KiB, and less than copying one of 1 MiB.
SMALLEST_BLOCK_BYTES = 1 << 20
# Measured on an H200: what a face costs in launches and thin kernels, and the rate of a copy.
_FACE_S, _COPIED_BYTES_PER_S = 20e-6, 4e12
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class BlockInPlace:
    """Plan for using the local block in place; all ranks have the same faces.

    Attributes:
        padding: zeros on both sides of the block, per dim with a window.
        faces: movements of the cells that each face reads into a slab: ghosts alone, or with local
            cells. Empty if no worker needs ghosts.
        outputs: slices of the output block with the outputs of each face.
    """

    padding: tuple[int, ...]
    faces: tuple[Movement, ...]
    outputs: tuple[tuple[slice, ...], ...]


def use_in_place(
    halo: HaloExchange,
    layout: BlockLayout,
    x: torch.Tensor,
    overlap: bool,
    with_own: bool = False,
) -> BlockInPlace | None:
    """Return how to use ``x`` in place; ``None``, on all ranks alike, if it should be copied.

    Args:
        halo: halo exchange that would copy the block.
        layout: layout of the input.
        x: local block.
        overlap: whether faces may be computed separately, if that is faster.
        with_own: whether slabs include local cells.
    """
    inputs, index = layout.decomposition, halo.P_x.index
    assert index is not None
    padding = own_paddings(inputs, halo.windows, index)
    if padding is None:
        return None
    if not have_faces(inputs, halo.windows, halo.periodic):
        return BlockInPlace(padding, (), ())
    if not overlap:
        return None
    faces = plan_faces(inputs, halo.windows, index, halo.periodic, with_own)
    if not _costs_less(halo, layout, least_block_bytes(suits_cpu(x), len(faces))):
        return None
    label = f"ghosts on {list(halo.P_x.shape)} of {list(inputs.shape)}"
    fill = halo.padding_value
    movements = [
        bind(face.plan, halo.P_x, f"{label}, face {i}", layout.dtype, x.shape, x.dtype, fill=fill)
        for i, face in enumerate(faces)
    ]
    return BlockInPlace(padding, tuple(movements), tuple(face.outputs.slices for face in faces))


def least_block_bytes(on_cpu: bool, faces: int) -> int:
    """Return the size of the smallest block that is used in place, with this number of faces.

    On a GPU, faces must cost less than the copy that they save: 40 MB a face.
    """
    if on_cpu or SMALLEST_BLOCK_BYTES == 0:
        return SMALLEST_BLOCK_BYTES
    return int(faces * _FACE_S * _COPIED_BYTES_PER_S / 2)


def convolves_in_place(x: torch.Tensor) -> bool:
    """Return whether a block that is large enough is also convolved in place.

    With gradients, not on a GPU: on an H200, the thin gradients of the faces' weights made a
    convolution and its backward take 1.3 to 2.2 times as long as next to a copy, at any size.
    """
    return suits_cpu(x) or SMALLEST_BLOCK_BYTES == 0 or not torch.is_grad_enabled()


# The same on all ranks; false if a block of the input or output is empty, and for dtypes that are
# summed in another dtype.
def _costs_less(halo: HaloExchange, layout: BlockLayout, least_bytes: int) -> bool:
    inputs = layout.decomposition.dims
    outputs = [window.outputs(blocks) for blocks, window in zip(inputs, halo.windows, strict=True)]
    cells = [[blocks.length(i) for i in range(blocks.parts)] for blocks in (*inputs, *outputs)]
    largest_bytes = prod(map(max, cells[: len(inputs)])) * layout.dtype.itemsize
    return layout.dtype in _DTYPES and min(map(min, cells)) > 0 and largest_bytes >= least_bytes
