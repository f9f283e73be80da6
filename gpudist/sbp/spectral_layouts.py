"""Layouts of spectra: which dims are split while others are transformed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from gpudist.cache import cache_of
from gpudist.geometry.layout import Layout, NdSbp, Sbp, broadcast, misfit, partial_sum, split
from gpudist.sbp.boxing import boxed_bytes
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.scope import current_scope


def home_of(x: GlobalTensor) -> NdSbp | None:
    """Return the attributes of the network's inputs, if ``x`` can have them."""
    scope = current_scope()
    if scope is None or x.dim() != scope.dims or not scope.home:
        return None
    return tuple(map(split, scope.home)) if x.placement == scope.placement else None


def split_dims(sbp: NdSbp) -> set[int]:
    return {attribute.dim for attribute in sbp if attribute.is_split}


def split_dims_of(x: GlobalTensor | None) -> set[int]:
    return set() if x is None else split_dims(x.sbp)


def _choice(x: GlobalTensor, key: object, make: Callable[[], Any]) -> Any:
    remembered: Any = x.placement.partition.wire.remembered
    return cache_of(remembered, "spectra", 1024).get_or_make((x._global_spec, key), make)


def without(
    x: GlobalTensor, whole: frozenset[int], along: frozenset[int], home: NdSbp | None = None
) -> NdSbp:
    """Return attributes of ``x`` that split none of the dims ``whole`` and have no terms.

    Prefer the attributes of ``home``; then those that leave no worker without cells; then
    transformed dims and the batch, since to split channels leaves terms to sum; then those that
    move the fewest bytes.
    """

    def choose() -> NdSbp:
        others = [split(d) for d in range(x.dim()) if d not in whole] or [broadcast]
        options: list[list[Sbp]] = []
        for axis, attribute in enumerate(x.sbp):
            if attribute != partial_sum and attribute.dim not in whole:
                options.append([attribute])
            elif home is not None and home[axis].dim not in whole:
                options.append([home[axis]])
            else:
                options.append(others)

        def price(sbp: NdSbp) -> tuple[int, ...]:
            layout = x.global_layout.with_sbp(sbp)
            cells = [box.volume for box in layout.boxes.values()]
            channels = sum(attribute.dim > 0 and attribute.dim not in along for attribute in sbp)
            moved = boxed_bytes(x.global_layout, layout, x.dtype)
            return cells.count(0), channels, moved, max(cells)

        return min(_fitting(options, x, tuple(x.shape)), key=price)

    return _choice(x, (whole, along, home), choose)


def _fitting(options: Sequence[list[Sbp]], x: GlobalTensor, shape: tuple[int, ...]) -> list[NdSbp]:
    # Explicit sizes of blocks fit only some.
    fitting = [sbp for sbp in product(*options) if not misfit(sbp, x.placement.shape, shape)]
    return fitting or [(broadcast,) * len(options)]


def way_back(
    x: GlobalTensor, late: frozenset[int], shape: tuple[int, ...], last: int, home: NdSbp
) -> NdSbp:
    """Return the attributes of the result of an inverse transform of modes ``x``.

    Dims that they split are transformed before the tensor moves. They leave no worker without
    cells, and move the fewest bytes, counting those from the result to ``home``.

    Args:
        x: modes.
        late: dims to transform, or to take steps along.
        shape: shape of the result.
        last: dim that becomes real, after all others are transformed; -1 if there is none.
        home: attributes of the network's inputs.
    """

    def choose() -> NdSbp:
        whole = (late & split_dims_of(x)) | {last}
        splits = [split(d) for d in range(x.dim()) if d not in whole]
        options: list[list[Sbp]] = []
        for attribute, at_home in zip(x.sbp, home, strict=True):
            others = [*splits, broadcast] if at_home.dim in whole else [at_home]
            kept = [] if attribute.is_split and attribute.dim in whole else [attribute]
            options.append([*kept, *others] if attribute.is_split else [*others, *kept])
        return min(_fitting(options, x, shape), key=price)

    def price(sbp: NdSbp) -> tuple[int, int]:
        early = late & split_dims(sbp)
        ranks, grid = x.global_layout.ranks, x.global_layout.grid
        moved = tuple([shape[d] if d in early else n for d, n in enumerate(x.shape)])
        source, result = Layout(ranks, grid, x.sbp, moved), Layout(ranks, grid, sbp, shape)
        idle = sum(not box.volume for box in result.boxes.values())
        left = boxed_bytes(result, result.with_sbp(home), x.dtype)
        left = left if last < 0 else left // 2
        return idle, boxed_bytes(source, source.with_sbp(sbp), x.dtype) + left

    return _choice(x, (late, shape, last, home), choose)
