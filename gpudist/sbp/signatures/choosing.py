"""Functions that take an index: embedding, ``index_select``, ``gather``, ``scatter_add``, one-hot.

If the indexed dim is split, each worker selects among its own cells, and the results are terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp.registry import AxisPart, Call, SbpSignature, Slot, Where, forms, register
from gpudist.sbp.signatures.across import terms


def _number(call: Call, position: int, name: str) -> int:
    given = call.get(position, name)
    assert isinstance(given, Slot)
    return given.number


def _ordered(numbers: Sequence[int], sbps: Sequence[Sbp]) -> tuple[Sbp, ...]:
    by_slot = dict(zip(numbers, sbps, strict=True))
    return tuple(by_slot[i] for i in range(len(by_slot)))


def own_index(index: torch.Tensor, where: Where, slot: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Return local positions along a dim, 0 outside this block, and a mask of those inside."""
    cells = where.inputs[slot]
    extent = where.call.tensors[slot].shape[dim]
    torch._assert_async(((index >= 0) & (index < extent)).all(), "an index is out of range")
    is_own = (index >= cells.start[dim]) & (index < cells.stop[dim])
    return (index - cells.start[dim]).where(is_own, 0), is_own


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
    numbers = _number(call, 0, "input"), _number(call, 1, "weight")
    dims = call.tensors[numbers[0]].dims
    rows = [((broadcast, split(1)), split(dims))]
    if call.kwargs.get("scale_grad_by_freq"):
        return [SbpSignature(_ordered(numbers, inputs), (y,)) for inputs, y in rows]
    rows += [((split(d), broadcast), split(d)) for d in range(dims)]
    rows.append(((broadcast, partial_sum), partial_sum))
    found = [SbpSignature(_ordered(numbers, inputs), (y,)) for inputs, y in rows]
    vocabulary = _ordered(numbers, (broadcast, split(0)))
    return [*found, SbpSignature(vocabulary, (partial_sum,), _without_padding, _embedding)]


def _without_padding(call: Call, part: AxisPart) -> Call:
    return call.replaced(2, "padding_idx", None)


def _embedding(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    index, slot = tensors[_number(call, 0, "input")], _number(call, 1, "weight")
    local, is_own = own_index(index, where, slot, 0)
    weight = with_cells(tensors[slot], 0)
    found = F.embedding(local, weight)
    padding = where.call.get(2, "padding_idx")
    if padding is not None:
        # The padding vector has no gradient.
        is_padding = index == padding % where.call.tensors[slot].shape[0]
        found = torch.where(is_padding.unsqueeze(-1), found.detach(), found)
    return found.where(is_own.unsqueeze(-1), 0)


@register(F.embedding_bag, any_cuts=True)
def embedding_bag(call: Call, parts: int) -> list[SbpSignature]:
    """Split bags of equal length, or the cells of vectors."""
    if call.get(3, "max_norm") is not None or call.get(7, "sparse", False):
        raise NotImplementedError(
            "embedding_bag of global tensors does not support max_norm and sparse; leave them out"
        )
    others = len(call.tensors) - 2
    found = [SbpSignature((broadcast, split(1), *(broadcast,) * others), (split(1),))]
    if call.tensors[0].dims == 2 and not call.get(5, "scale_grad_by_freq", False):
        bags = SbpSignature((split(0), broadcast, *(split(0),) * others), (split(0),))
        found.insert(0, bags)
    return found


@register(*forms("index_select"), any_cuts=True)
def index_select(call: Call, parts: int) -> list[SbpSignature]:
    numbers = _number(call, 0, "input"), _number(call, 2, "index")
    x = call.tensors[numbers[0]]
    dim = call.get(1, "dim") % max(x.dims, 1)
    rows = [((split(d), broadcast), split(d)) for d in range(x.dims) if d != dim]
    rows.append(((broadcast, split(0)), split(dim)))
    return _chosen(call, numbers, rows, dim)


@register(*forms("gather"), any_cuts=True)
def gather(call: Call, parts: int) -> list[SbpSignature]:
    """Split dims in which index and tensor have equal extents, and the index along ``dim``."""
    numbers = _number(call, 0, "input"), _number(call, 2, "index")
    x, index = (call.tensors[i].shape for i in numbers)
    dim = call.get(1, "dim") % max(len(x), 1)
    rows = [
        ((split(d), split(d)), split(d)) for d in range(len(x)) if d != dim and x[d] == index[d]
    ]
    rows.append(((broadcast, split(dim)), split(dim)))
    return _chosen(call, numbers, rows, dim)


def _chosen(
    call: Call, numbers: tuple[int, int], rows: Sequence[tuple[tuple[Sbp, Sbp], Sbp]], dim: int
) -> list[SbpSignature]:
    """Return ``rows`` with signatures for a tensor that is split along ``dim`` or is in terms."""
    x = call.tensors[numbers[0]]
    if not x.dims:
        return []
    found = [SbpSignature(_ordered(numbers, inputs), (y,)) for inputs, y in rows]
    if x.dtype != torch.bool:
        split_along = _ordered(numbers, (split(dim), broadcast))
        found.append(SbpSignature(split_along, (partial_sum,), run=_choose))
    return [*found, *terms(call, numbers[0])]


def _choose(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    slot, at = _number(call, 0, "input"), _number(call, 2, "index")
    dim = call.get(1, "dim") % tensors[slot].dim()
    local, is_own = own_index(tensors[at], where, slot, dim)
    x = with_cells(tensors[slot], dim)
    if call.function.__name__ == "gather":
        return x.gather(dim, local).where(is_own, 0)
    trailing = (1,) * (x.dim() - dim - 1)
    return x.index_select(dim, local).where(is_own.view(-1, *trailing), 0)


def scatter_add(call: Call, parts: int) -> list[SbpSignature]:
    """Split any dim of the source; along ``dim`` the results are terms."""
    numbers = _number(call, 0, "input"), _number(call, 2, "index"), _number(call, 3, "src")
    x, index, source = (call.tensors[i].shape for i in numbers)
    dim = call.get(1, "dim") % max(len(x), 1)
    found: list[SbpSignature] = []
    for d in range(len(x)):
        if index[d] != source[d]:
            continue
        if d != dim and index[d] == x[d]:
            found.append(SbpSignature((split(d),) * 3, (split(d),)))
        if d == dim:
            given = _ordered(numbers, (partial_sum, split(d), split(d)))
            found.append(SbpSignature(given, (partial_sum,)))
    return [*found, *terms(call, numbers[0], numbers[2])]


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
