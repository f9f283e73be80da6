"""When a layer with windows uses its own block in place instead of a copy beside its ghosts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from gpudist.exchange import Movement, bind
from gpudist.geometry.faces import have_faces, own_paddings, plan_faces
from gpudist.ops.agreement import Layout
from gpudist.ops.halo_exchange import HaloExchange

# Measured with one thread: the kernels of its faces cost more than a copy of a block of 256 KiB and
# less than one of 1 MiB.
SMALLEST_BLOCK_BYTES = 1 << 20
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class BlockInPlace:
    """How the own block is used in place; on every rank with the same faces.

    Attributes:
        padding: zeros on both sides of the block, per dim with a window.
        faces: movements of what each face reads from the block to a slab: its ghosts, or own cells
            too. None if no worker needs a ghost.
        outputs: where in the output block the outputs of each face are.
    """

    padding: tuple[int, ...]
    faces: tuple[Movement, ...]
    outputs: tuple[tuple[slice, ...], ...]


def use_in_place(
    halo: HaloExchange,
    layout: Layout,
    x: torch.Tensor,
    overlap: bool,
    with_own: bool = False,
) -> BlockInPlace | None:
    """How the block ``x`` is read in place; ``None``, on all ranks alike, if it is better copied.

    Args:
        halo: the exchange that would copy it.
        layout: of the input.
        x: the block.
        overlap: whether faces may be treated apart, where that pays.
        with_own: whether slabs have own cells too.
    """
    inputs, index = layout.decomposition, halo.P_x.index
    assert index is not None
    padding = own_paddings(inputs, halo.windows, index)
    if padding is None:
        return None
    if not have_faces(inputs, halo.windows, halo.periodic):
        return BlockInPlace(padding, (), ())
    if not overlap or not _pays(halo, layout):
        return None
    faces = plan_faces(inputs, halo.windows, index, halo.periodic, with_own)
    label = f"ghosts on {list(halo.P_x.shape)} of {list(inputs.shape)}"
    fill = halo.padding_value
    movements = [
        bind(face.plan, halo.P_x, f"{label}, face {i}", layout.dtype, x.shape, x.dtype, fill=fill)
        for i, face in enumerate(faces)
    ]
    return BlockInPlace(padding, tuple(movements), tuple(face.outputs.slices for face in faces))


def _pays(halo: HaloExchange, layout: Layout) -> bool:
    """Whether blocks are so large that treating their faces apart costs less than a copy.

    Never if some block of the input or output is empty, or in dtypes whose sums are kept in another
    one. The same on all ranks.
    """
    inputs = layout.decomposition.dims
    outputs = [window.outputs(blocks) for blocks, window in zip(inputs, halo.windows, strict=True)]
    cells = [[blocks.length(i) for i in range(blocks.parts)] for blocks in (*inputs, *outputs)]
    largest_bytes = prod(map(max, cells[: len(inputs)])) * layout.dtype.itemsize
    return (
        layout.dtype in _DTYPES
        and min(map(min, cells)) > 0
        and largest_bytes >= SMALLEST_BLOCK_BYTES
    )
