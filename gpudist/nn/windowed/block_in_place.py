"""Decide whether a windowed layer uses its block in place, without copying it to its ghosts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from gpudist.exchange import Movement, bind
from gpudist.geometry.faces import Face, most_faces, own_paddings, plan_faces
from gpudist.geometry.halo import Halo
from gpudist.nn.autocast import LOW
from gpudist.nn.gpu_rates import GpuRates, rates_of
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import own_index
from gpudist.ops.shape_agreement import BlockLayout

# Measured with one thread: computing the faces separately costs more than copying a block of
# 256 KiB, and less than copying one of 1 MiB.
SMALLEST_BLOCK_BYTES = 1 << 20
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class BlockInPlace:
    """Plan for using the local block in place; all ranks have the same faces.

    Attributes:
        padding: zeros on both sides of the block, per dim with a window.
        faces: movements of the cells that each face reads into a slab: ghosts alone, or with local
            cells. Empty if no worker needs ghosts.
        outputs: slices of the output block with the outputs of each face.
        planned: plan of each face.
        in_training: whether it is also faster with gradients.
    """

    padding: tuple[int, ...]
    faces: tuple[Movement, ...]
    outputs: tuple[tuple[slice, ...], ...]
    planned: tuple[Face, ...] = ()
    in_training: bool = True


def use_in_place(
    exchange: HaloExchange,
    layout: BlockLayout,
    x: torch.Tensor,
    overlap: bool,
    with_own: bool = False,
) -> BlockInPlace | None:
    """Return how to use ``x`` in place; ``None``, on all ranks alike, if it should be copied.

    Args:
        exchange: halo exchange that would copy the block.
        layout: layout of the input.
        x: local block.
        overlap: whether faces may be computed separately, if that is faster.
        with_own: whether slabs include local cells. Gradients of such slabs are added to the
            block's, which 16-bit dtypes are not.
    """
    inputs, halo, P_x = layout.decomposition, exchange.halo, exchange.P_x
    padding = own_paddings(inputs, halo.windows, own_index(P_x))
    if padding is None:
        return None
    count = most_faces(inputs, halo)
    if count == 0:
        return BlockInPlace(padding, (), ())
    if not overlap or layout.dtype not in (_WIDE if with_own else (*_WIDE, *LOW)):
        return None
    cells = _cells_of_largest_block(halo, layout)
    # A block without data stands for one on the device of the planned world.
    is_on_cpu = suits_cpu(x) or (x.is_meta and not P_x.wire.has_streams)
    gpu = None if is_on_cpu else rates_of(P_x.wire.gpu)
    sends = any(blocks.parts > 1 for blocks in inputs.dims[2:])
    conditions = (gpu, layout.dtype.itemsize * cells, count, sends)
    if cells == 0 or not saves_time(*conditions, trains=False):
        return None
    faces = plan_faces(inputs, halo, own_index(P_x), with_own)
    label = f"ghosts on {list(P_x.shape)} of {list(inputs.shape)}"
    fill = exchange.padding_value
    movements = [
        bind(face.plan, P_x, f"{label}, face {i}", layout.dtype, x.shape, x.dtype, fill=fill)
        for i, face in enumerate(faces)
    ]
    outputs = tuple(face.outputs.slices for face in faces)
    trains = saves_time(*conditions, trains=True)
    return BlockInPlace(padding, tuple(movements), outputs, faces, trains)


def saves_time(
    gpu: GpuRates | None, block_bytes: int, faces: int, sends: bool, trains: bool
) -> bool:
    """Return whether faces cost less than a copy of the block in forward, and the wait for ghosts.

    Backward copies the block either way, if the weight learns. The arguments are equal on all
    ranks.

    Args:
        gpu: rates of the GPUs; ``None`` for a CPU, where messages do not move by themselves.
        block_bytes: size of the largest block.
        faces: number of faces of a worker at most.
        sends: whether ghosts come from other workers, during the computation of the block.
        trains: whether there is a backward.
    """
    if gpu is None or SMALLEST_BLOCK_BYTES == 0:
        return block_bytes >= SMALLEST_BLOCK_BYTES
    ways = 2 if trains else 1
    copy_s = 2 * block_bytes / gpu.copied_bytes_per_s
    # The block's own computation takes at least as long as a copy.
    hidden_s = min(gpu.message_s, copy_s) if sends else 0.0
    return copy_s + ways * hidden_s > ways * faces * gpu.face_s


def _cells_of_largest_block(halo: Halo, layout: BlockLayout) -> int:
    # The same on all ranks; 0 if any block of the input or output is empty.
    inputs = layout.decomposition.dims
    outputs = [window.outputs(blocks) for blocks, window in zip(inputs, halo.windows, strict=True)]
    cells = [blocks.lengths for blocks in (*inputs, *outputs)]
    return prod(map(max, cells[: len(inputs)])) if min(map(min, cells)) > 0 else 0
