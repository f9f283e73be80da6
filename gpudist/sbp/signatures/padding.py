"""Padding: every worker keeps its cells, and workers at the edges add the padding."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise

import torch.nn.functional as F

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.layout import partial_sum, split
from gpudist.geometry.windows import source_cell
from gpudist.sbp.call import Call
from gpudist.sbp.registry import AxisPart, SbpSignature, register
from gpudist.sbp.signatures.fetching import Fetch, Sizes, fetching

Widths = tuple[int, int]


def widths_of(call: Call) -> dict[int, Widths]:
    """Return the cells added before and after, by dim; negative numbers remove cells."""
    dims, numbers = call.tensors[0].dims, [int(width) for width in call.get(1, "pad")]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return {dims - 1 - i: pair for i, pair in enumerate(pairs) if any(pair)}


def padded_cut(widths: Widths, sizes: Sizes) -> Sizes:
    """Return the block sizes of the result, in which every cell stays on its worker."""
    left, right = widths
    extent = max(0, sum(sizes) + left + right)
    inside = [min(max(edge + left, 0), extent) for edge in accumulate(sizes[:-1])]
    return tuple(b - a for a, b in pairwise([0, *inside, extent]))


@register(F.pad, any_cuts=True)
def pad(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear if padded with zeros or with cells of the tensor."""
    mode = call.get(2, "mode", "constant")
    if mode != "constant":
        return fetching(call, parts, partial(_sources_of_copies, mode), takes_empty=False)
    widths = widths_of(call)
    signatures = [
        _padding_signature(dim, extent, widths[dim], parts)
        if dim in widths
        else SbpSignature((split(dim),), (split(dim),))
        for dim, extent in enumerate(call.shapes[0])
    ]
    zeros = SbpSignature((partial_sum,), (partial_sum,))
    return signatures if call.get(3, "value") else [*signatures, zeros]


def _padding_signature(
    dim: int, extent: int, widths: Widths, parts: int, sizes: Sizes | None = None
) -> SbpSignature:
    input_sizes = sizes or Blocks(extent, parts).lengths
    output_sizes = padded_cut(widths, input_sizes)

    def localize(call: Call, part: AxisPart) -> Call:
        return call.with_argument(
            1, "pad", _of_block(call, dim, input_sizes, output_sizes, widths[0], part.index)
        )

    again = partial(_padding_signature, dim, extent, widths, parts)
    return SbpSignature((split(dim, sizes),), (split(dim, output_sizes),), localize, recut=again)


def _of_block(
    call: Call, dim: int, sizes: Sizes, output_sizes: Sizes, left: int, index: int
) -> tuple[int, ...]:
    """Return the ``F.pad`` argument for the block at ``index``."""
    start, first = sum(sizes[:index]), sum(output_sizes[:index]) - left
    front, behind = start - first, first + output_sizes[index] - start - sizes[index]
    if not output_sizes[index]:
        front, behind = -sizes[index], 0
    elif not sizes[index]:
        front, behind = output_sizes[index], 0
    pad = list(call.get(1, "pad"))
    at = 2 * (call.tensors[0].dims - 1 - dim)
    return (*pad[:at], front, behind, *pad[at + 2 :])


def _sources_of_copies(mode: str, call: Call) -> dict[int, Fetch]:
    sources: dict[int, Fetch] = {}
    for dim, (left, right) in widths_of(call).items():
        n = call.shapes[0][dim]
        if not n:
            # This call is for an empty block; the cells to fetch follow from the global tensor.
            sources[dim] = Fetch((), partial(padded_cut, (left, right)))
            continue
        places = range(-left, n + right)
        if mode == "circular":
            # torch removes cells first, and wraps those that remain.
            first, last = max(0, -left), n + min(0, right)
            cells = [first + (i - first) % (last - first) for i in places]
        else:
            cells = [source_cell(mode, i, n) for i in places]
        sources[dim] = Fetch(cells, partial(padded_cut, (left, right)))
    return sources
