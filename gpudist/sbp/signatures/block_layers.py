"""Functions along the last dims of a tensor, computed on blocks by layers of ``gpudist.nn``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

import torch

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.layout import split
from gpudist.nn.distributed_module import set_layouts
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.sbp.call import Call, Compute
from gpudist.sbp.registry import Bind, SbpSignature, Where
from gpudist.sbp.signatures.across import axes_that_split
from gpudist.sbp.trees import map_tree
from gpudist.world.partition import CartesianPartition

MakeLayer = Callable[[CartesianPartition], Any]


def along_last(call: Call, bind: Bind, dims: int, results: int = 1) -> list[SbpSignature]:
    """Return signatures that split any dim; results of the last ``dims`` are balanced.

    Args:
        call: call of the function.
        bind: shared ``bind`` of all these signatures.
        dims: number of last dims.
        results: number of results.
    """
    signatures: list[SbpSignature] = []
    for dim in range(call.tensors[0].dims):
        leads, both = dim < call.tensors[0].dims - dims, ((split(dim),), (split(dim),) * results)
        cuts: Literal["all", "inputs"] = "all" if leads else "inputs"
        signatures.append(SbpSignature(*both, bind=bind, nests=leads, cuts=cuts))
    return signatures


def no_samples(where: Where, dims: int) -> Compute:
    """Return the function for a worker without samples, which builds the graph of the others."""
    last = where.call.shapes[0][-dims:]

    (shape,) = {box.shape for box in where.outputs}

    def compute(tensors: Sequence[torch.Tensor]) -> Any:
        none = tensors[0].reshape(-1)[:0]
        # Some functions of torch reject meta tensors without samples.
        x = none.sum().expand(1, 1, *last) if none.is_meta else none.view(0, 1, *last)
        return map_tree(where.call([x]), lambda y: y[:0].view(shape))

    return compute


def along_last_dims(where: Where, dims: int) -> Where:
    """Return ``where`` restricted to workers that differ in their block of the last ``dims``."""
    first = len(where.inputs[0].shape) - dims
    axes = axes_that_split(where, 0, range(first, first + dims))
    return replace(where, P=where.P.along(axes))


def bind_along_last(
    dims: int, bind: Callable[[Where], Compute], call: Call, where: Where
) -> Compute:
    """Bind a function along the last ``dims``: torch's own if they are whole, else by ``bind``."""
    if 0 in where.inputs[0].shape[:-dims]:
        return no_samples(where, dims)
    where = along_last_dims(where, dims)
    return call if where.P.size == 1 else bind(where)


class LayerAlongLast:
    """A layer on ``[B, C, *last]`` for one layout of a tensor with any leading dims.

    Args:
        where: context whose workers differ only in the last dims.
        dims: number of last dims.
        make: creates the layer for a partition.
        name: name of the function, for messages.
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
        layout = BlockLayout(name, P.shape, where.call.tensors[0].dtype, cut)
        set_layouts(self.layer, layout)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        (x,) = tensors
        if len(self.leading) == 2:
            return self.layer.forward(x)
        y = self.layer.forward(x.reshape(*self.folded, *x.shape[x.dim() - self.dims :]))
        return map_tree(y, lambda block: block.reshape(*self.leading, *block.shape[2:]))
