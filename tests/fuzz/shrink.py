"""Make any failing case smaller, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.fuzz.case import Case

MAX_TRIALS = 300


def shrink(case: Case, still_fails: Callable[[Case], bool], trials: int = MAX_TRIALS) -> Case:
    """Return the smallest case that is found by making one thing smaller at a time.

    Args:
        case: fails.
        still_fails: carries out a case; may say ``False`` to one that makes no sense.
        trials: how many to carry out at most.
    """
    tried: set[str] = set()
    found = True
    while found:
        found = False
        for smaller in _smaller_cases(case):
            if repr(smaller) in tried:
                continue
            if len(tried) == trials:
                return case
            tried.add(repr(smaller))
            if still_fails(smaller):
                case, found = smaller, True
                break
    return case


def _smaller_cases(case: Case) -> Iterator[Case]:
    """Cases with one thing less, what takes away most first."""
    for name in case.options:
        yield replace(case, options=_without(case.options, name))
    for name in case.extra:
        yield replace(case, extra=_without(case.extra, name))
    for d in case.sizes:
        yield replace(case, sizes=_without(case.sizes, d))
    for plain in ({"dtype": "float64"}, {"seed": 0}):
        smaller = replace(case, **plain)
        if smaller != case:
            yield smaller
    yield from _smaller_grids(case)
    yield from _smaller_shapes(case)
    for name, value in case.options.items():
        for less in _smaller_values(value):
            yield replace(case, options={**case.options, name: less})
    for name, value in case.extra.items():
        for less in _smaller_values(value):
            yield replace(case, extra={**case.extra, name: less})


def _smaller_grids(case: Case) -> Iterator[Case]:
    """Fewer workers along an axis; of uneven blocks, the first ones are joined."""
    for axis, extent in enumerate(case.grid):
        for less in _smaller_numbers(extent, 1):
            grid = _with(case.grid, axis, less)
            dim = axis + len(case.shape) - len(case.grid)
            sizes = dict(case.sizes)
            if dim in sizes:
                joined = 1 + extent - less
                sizes[dim] = (sum(sizes[dim][:joined]), *sizes[dim][joined:])
            yield replace(case, grid=grid, sizes=sizes)


def _smaller_shapes(case: Case) -> Iterator[Case]:
    """Fewer cells along a dim, or in one of its uneven blocks."""
    for d, extent in enumerate(case.shape):
        blocks = case.sizes.get(d)
        if blocks is None:
            for less in _smaller_numbers(extent, 1):
                yield replace(case, shape=_with(case.shape, d, less))
            continue
        for i, cells in enumerate(blocks):
            for less in _smaller_numbers(cells, 0):
                fewer = _with(blocks, i, less)
                yield replace(
                    case,
                    shape=_with(case.shape, d, sum(fewer)),
                    sizes={**case.sizes, d: fewer},
                )


def _smaller_values(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield from _smaller_numbers(value, 0)
    elif isinstance(value, tuple) and value:
        if all(each == value[0] for each in value):
            yield value[0]
        for i, each in enumerate(value):
            for less in _smaller_values(each):
                yield _with(value, i, less)


def _smaller_numbers(number: int, least: int) -> list[int]:
    found = [least, number // 2, number - 1]
    return [less for less in dict.fromkeys(found) if least <= less < number]


def _with(entries: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*entries[:i], value, *entries[i + 1 :])


def _without(entries: Mapping[Any, Any], name: Any) -> dict[Any, Any]:
    return {other: value for other, value in entries.items() if other != name}
