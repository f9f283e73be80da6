"""Refusals that are right: what they say is listed here, and true."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

_LAYER = r"(?:Shape|Partition)Error: (?:Distributed\w+|HaloRegion)(?:, dim -?\d+)?: "


def _numbers(text: str) -> list[int]:
    return list(map(int, re.findall(r"-?\d+", text)))


def _has_no_cell_left(padding: str, extent: str) -> bool:
    return int(extent) < 1 or int(extent) + sum(_numbers(padding)) < 1


def _are_not_whole_groups(groups: str, inputs: str, outputs: str, P_w: str) -> bool:
    # Each block of channels must hold whole groups, and one worker compute it.
    has_one_each = _numbers(P_w)[:2] == [int(outputs), 1]
    return inputs != outputs or int(groups) % int(inputs) != 0 or not has_one_each


def _are_not_balanced(lengths: str) -> bool:
    given = json.loads(lengths)
    size, larger = divmod(sum(given), len(given))
    return given != [size + (index < larger) for index in range(len(given))]


def _crops_and_wraps(first: str, last: str) -> bool:
    return int(first) * int(last) < 0


def _always(*_: str) -> bool:
    return True


# Patterns, and what makes the refusal right, by the pattern's groups.
_REFUSALS: Sequence[tuple[str, Callable[..., bool]]] = (
    (
        r"(\d+) blocks but only (\d+) (?:(?:in|out)put (?:channels|features)|embeddings|"
        r"dims of an embedding); use at most \d+ workers along that axis",
        lambda blocks, cells: int(blocks) > int(cells),
    ),
    (
        r"P_x has shape (\[.*\]) but needs axes for batch, sequence and features, with 1 worker "
        r"along the last",
        lambda shape: _numbers(shape)[-1] != 1 or len(_numbers(shape)) != 3,
    ),
    (
        r"P_x has shape (\[.*\]) but needs at least 3 axes with one worker along the channels; "
        r"repartition the input first",
        lambda shape: len(_numbers(shape)) < 3 or _numbers(shape)[1] != 1,
    ),
    (
        r"P_x of shape (\[.*\]) splits the channels; give P_y and P_w of shapes .* too",
        lambda shape: _numbers(shape)[1] > 1,
    ),
    (
        r"padding \((-?\d+), (-?\d+)\) crops on one side and wraps on the other, which is not "
        r"supported; crop first, then pad",
        _crops_and_wraps,
    ),
    (
        r"padding (\(.*\)) in mode '\w+' needs at least one cell and must leave one, but the "
        r"global extent is (\d+)",
        _has_no_cell_left,
    ),
    (
        r"groups (\d+) with split channels need a block-diagonal partition: as many blocks of input"
        r" as of output channels, a divisor of groups, and P_w of shape \[.*\]; got (\d+) and "
        r"(\d+) blocks and P_w (\[.*\])",
        _are_not_whole_groups,
    ),
    (
        r"the input's blocks have (\[.*\]) channels, but running statistics are kept for balanced "
        r"blocks; repartition the input or pass track_running_stats=False",
        _are_not_balanced,
    ),
    (
        r"a transposed window with kernel (\d+), stride (\d+) and padding (\d+) has no output for "
        r"(\d+) cells",
        lambda kernel, stride, padding, cells: (
            (int(cells) - 1) * int(stride) + int(kernel) <= 2 * int(padding)
        ),
    ),
    (
        r"(\d+) cells with scale_factor (\S+) have no output; torch interpolates at least one cell "
        r"to at least one",
        lambda cells, factor: int(cells) * float(factor) < 1,
    ),
    (
        r"a window of kernel (\d+) and dilation (\d+) over (\d+) cells holds padding only; "
        r"pad less",
        # Only such taps can lie on both sides of all cells, since windows overlap the input.
        lambda kernel, dilation, cells: int(kernel) > 1 and int(dilation) > int(cells),
    ),
    (r"(?:max_norm|sparse) is not supported; omit it", _always),
    (r"none of the layers is distributed; use a Sequential", _always),
)


def is_right(text: str) -> bool:
    """Return whether a refusal with this text is listed, and true."""
    for pattern, is_true in _REFUSALS:
        found = re.fullmatch(_LAYER + pattern, text)
        if found is not None:
            return is_true(*found.groups())
    return False
