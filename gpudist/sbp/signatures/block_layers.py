"""Functions along the last dims of a tensor, whose blocks layers of ``gpudist.nn`` compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.ops.agreement import Agreement, Layout
from gpudist.sbp.attributes import partial_sum, split
from gpudist.sbp.registry import Bind, Call, Compute, Signature, Where, mapped
from gpudist.world.partition import CartesianPartition

MakeLayer = Callable[[CartesianPartition], Any]


def along_last(call: Call, bind: Bind, dims: int, results: int = 1) -> list[Signature]:
    """Signatures that split any dim; those of the last ``dims`` have balanced blocks of results.

    Args:
        bind: carries out all of them together.
    """
    first = call.tensors[0].dims - dims
    leading = [_leading(dim, bind, results) for dim in range(first)]
    return leading + [_windowed(first + i, bind, results) for i in range(dims)]


def _leading(dim: int, bind: Bind, results: int, sizes: tuple[int, ...] | None = None) -> Signature:
    """Samples, of which each is computed alone."""
    recut = partial(_leading, dim, bind, results)
    outputs = (split(dim, sizes),) * results
    return Signature((split(dim, sizes),), outputs, recut=recut, bind=bind)


def _windowed(
    dim: int, bind: Bind, results: int, sizes: tuple[int, ...] | None = None
) -> Signature:
    recut = partial(_windowed, dim, bind, results)
    outputs = (split(dim),) * results
    return Signature((split(dim, sizes),), outputs, recut=recut, bind=bind, nests=False)


def in_parts(dim: int, bind: Bind, sizes: tuple[int, ...] | None = None) -> Signature:
    """Each worker has a term of the result, of its own cells."""
    recut = partial(in_parts, dim, bind)
    return Signature((split(dim, sizes),), (partial_sum,), recut=recut, bind=bind)


def no_samples(where: Where, dims: int) -> Compute:
    """What a worker computes that has none of the samples, with torch's graph for some."""
    last = where.call.shapes[0][-dims:]

    (shape,) = {box.shape for box in where.outputs}

    def compute(tensors: Sequence[torch.Tensor]) -> Any:
        none = tensors[0].reshape(-1)[:0]
        # Without cells some functions of torch refuse to have no samples.
        x = none.sum().expand(1, 1, *last) if none.is_meta else none.view(0, 1, *last)
        return mapped(where.call([x]), lambda y: y[:0].view(shape))

    return compute


def split_last(where: Where, dims: int) -> Where:
    """``where`` with the workers alone that differ in their block of the last ``dims``."""
    first = len(where.inputs[0].shape) - dims
    axes = [
        axis
        for axis, one in enumerate(where.sbps[0])
        if one.is_split and one.dim >= first and where.P.shape[axis] > 1
    ]
    return replace(where, P=where.P.along(axes))


class LayerAlongLast:
    """A layer on ``[B, C, *last]`` for one layout of a tensor with any leading dims.

    Args:
        where: its workers differ in the last dims alone.
        dims: how many these are.
        make: the layer for a partition.
        block: shape of this worker's block of the layer's input.
    """

    def __init__(self, where: Where, dims: int, make: MakeLayer, name: str) -> None:
        P, blocks = where.cut(0)
        self.leading = tuple(blocks.extent for blocks in blocks.dims[:-dims])
        folded = self.leading if len(self.leading) == 2 else (prod(self.leading), 1)
        last = blocks.dims[-dims:]
        P = P.create_cartesian_topology_partition([1, 1, *(cut.parts for cut in last)])
        cut = Decomposition((*(Blocks(n, 1) for n in folded), *last))
        self.folded = folded
        self.dims = dims
        self.layer = make(P)
        layout = Layout(name, P.shape, where.call.tensors[0].dtype, cut)
        for agreement in _agreements(self.layer):
            agreement.settle(layout)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        (x,) = tensors
        if len(self.leading) == 2:
            return self.layer.forward(x)
        y = self.layer.forward(x.reshape(*self.folded, *x.shape[x.dim() - self.dims :]))
        return mapped(y, lambda block: block.reshape(*self.leading, *block.shape[2:]))


def _agreements(layer: Any) -> Iterator[Agreement]:
    """What a layer, and one within it, know the input's blocks by."""
    for one in layer.modules():
        found = getattr(one, "agreement", None) or getattr(one, "_agreement", None)
        if isinstance(found, Agreement):
            yield found
