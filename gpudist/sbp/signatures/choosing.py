"""Functions that take an index: embedding, ``index_select``, ``gather``, ``scatter_add``, one-hot.

If the indexed dim is split, each worker selects among its own cells, and the results are terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.nn.affine.embedding import rows_of_block
from gpudist.sbp.call import Call
from gpudist.sbp.registry import AxisPart, SbpSignature, Where, forms, register
from gpudist.sbp.signatures.across import terms


def own_index(index: torch.Tensor, where: Where, slot: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Return local positions along a dim, 0 outside this block, and a mask of those inside."""
    cells = where.inputs[slot]
    require_index(index, where.call.tensors[slot].shape[dim])
    is_own = (index >= cells.start[dim]) & (index < cells.stop[dim])
    return (index - cells.start[dim]).where(is_own, 0), is_own


def require_index(index: torch.Tensor, extent: int) -> None:
    torch._assert_async(((index >= 0) & (index < extent)).all(), "an index is out of range")


def with_cells(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``x``, or one zero in its place if it has no cells along ``dim``."""
    return x if x.shape[dim] else x.sum(dim, keepdim=True)


@register(F.embedding, any_cuts=True)
def embedding(call: Call, parts: int) -> list[SbpSignature]:
    """Split the index, the embedding dim or the vocabulary; linear in the weight."""
    for name in ("max_norm", "sparse"):
        if call.kwargs.get(name):
            raise NotImplementedError(
                f"embedding: {name} is not supported by global tensors; leave it out"
            )
    dims = call.tensors[0].dims
    columns = SbpSignature((broadcast, split(1)), (split(dims),))
    if call.kwargs.get("scale_grad_by_freq"):
        return [columns]
    return [
        columns,
        *(SbpSignature((split(d), broadcast), (split(d),)) for d in range(dims)),
        SbpSignature((broadcast, partial_sum), (partial_sum,)),
        SbpSignature((broadcast, split(0)), (partial_sum,), _without_padding, _embedding),
    ]


def _without_padding(call: Call, part: AxisPart) -> Call:
    return call.with_argument(2, "padding_idx", None)


def _embedding(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    index, weight = tensors
    extent, padding = where.call.shapes[1][0], where.call.get(2, "padding_idx")
    require_index(index, extent)
    padding = None if padding is None else padding % extent
    return rows_of_block(index, with_cells(weight, 0), where.inputs[1].start[0], padding)


@register(F.embedding_bag, any_cuts=True)
def embedding_bag(call: Call, parts: int) -> list[SbpSignature]:
    """Split bags of equal length, or the cells of vectors."""
    if call.get(3, "max_norm") is not None or call.get(7, "sparse", False):
        raise NotImplementedError(
            "embedding_bag of global tensors does not support max_norm and sparse; leave them out"
        )
    others = len(call.tensors) - 2
    signatures = [SbpSignature((broadcast, split(1), *(broadcast,) * others), (split(1),))]
    if call.tensors[0].dims == 2 and not call.get(5, "scale_grad_by_freq", False):
        bags = SbpSignature((split(0), broadcast, *(split(0),) * others), (split(0),))
        signatures.insert(0, bags)
    return signatures


@register(*forms("index_select"), any_cuts=True)
def index_select(call: Call, parts: int) -> list[SbpSignature]:
    dims = call.tensors[0].dims
    dim = call.get(1, "dim") % max(dims, 1)
    rows = [((split(d), broadcast), split(d)) for d in range(dims) if d != dim]
    rows.append(((broadcast, split(0)), split(dim)))
    return _choice_signatures(call, rows, dim)


@register(*forms("gather"), any_cuts=True)
def gather(call: Call, parts: int) -> list[SbpSignature]:
    """Split dims in which index and tensor have equal extents, and the index along ``dim``."""
    x, index = call.shapes
    dim = call.get(1, "dim") % max(len(x), 1)
    rows = [
        ((split(d), split(d)), split(d)) for d in range(len(x)) if d != dim and x[d] == index[d]
    ]
    rows.append(((broadcast, split(dim)), split(dim)))
    return _choice_signatures(call, rows, dim)


def _choice_signatures(
    call: Call, rows: Sequence[tuple[tuple[Sbp, Sbp], Sbp]], dim: int
) -> list[SbpSignature]:
    """Return ``rows`` with signatures for a tensor that is split along ``dim`` or is in terms."""
    x = call.tensors[0]
    if not x.dims:
        return []
    signatures = [SbpSignature(inputs, (y,)) for inputs, y in rows]
    if x.dtype != torch.bool:
        signatures.append(SbpSignature((split(dim), broadcast), (partial_sum,), run=_choose))
    return [*signatures, *terms(call, 0)]


def _choose(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    x, index = tensors
    dim = call.get(1, "dim") % x.dim()
    local, is_own = own_index(index, where, 0, dim)
    x = with_cells(x, dim)
    if call.function.__name__ == "gather":
        return x.gather(dim, local).where(is_own, 0)
    trailing = (1,) * (x.dim() - dim - 1)
    return x.index_select(dim, local).where(is_own.view(-1, *trailing), 0)


def scatter_add(call: Call, parts: int) -> list[SbpSignature]:
    """Split any dim of the source; along ``dim`` the results are terms."""
    x, index, source = call.shapes
    dim = call.get(1, "dim") % max(len(x), 1)
    signatures: list[SbpSignature] = []
    for d in range(len(x)):
        if index[d] != source[d]:
            continue
        if d != dim and index[d] == x[d]:
            signatures.append(SbpSignature((split(d),) * 3, (split(d),)))
        if d == dim:
            signatures.append(SbpSignature((partial_sum, split(d), split(d)), (partial_sum,)))
    return [*signatures, *terms(call, 0, 2)]


register(torch.scatter_add, torch.Tensor.scatter_add, any_cuts=True)(scatter_add)
register(torch.Tensor.scatter_add_, in_place=True, any_cuts=True)(scatter_add)


@register(F.one_hot, any_cuts=True)
def one_hot(call: Call, parts: int) -> list[SbpSignature]:
    if call.get(1, "num_classes", -1) < 0:
        raise NotImplementedError(
            "one_hot of a global tensor: num_classes is not given or negative; pass the number "
            "of classes"
        )
    return [SbpSignature((split(d),), (split(d),)) for d in range(call.tensors[0].dims)]
