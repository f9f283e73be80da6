"""The choice between direct and nested halo exchanges, beside the plans of all workers."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given

from gpudist.geometry import Blocks, Decomposition, Halo, HaloWidths, Plan, SlidingWindow
from gpudist.geometry.halo_choice import MessageGroup, costs_less_nested, groups_of_halo
from tests.geometry.test_halo import cases, plans_of

STENCIL = HaloWidths(1, 1)


def groups_of(plans: list[Plan]) -> list[MessageGroup]:
    """For each stage, the most of each number in any worker's plan."""
    return [
        MessageGroup(
            max(max(len(stage.sends), len(stage.receives)) for stage in stages),
            max(sum(message.volume for message in stage.receives) for stage in stages),
            max(prod(stage.output_shape or ()) for stage in stages),
        )
        for stages in zip(*(plan.stages for plan in plans), strict=True)
    ]


@given(cases())
def test_every_worker_has_the_chosen_plan(case: Any):
    """Also of uneven and empty blocks; no plan costs more than is assumed."""
    inputs, windows, periodic = case
    options = Halo(windows, periodic)
    for nested, groups in enumerate(groups_of_halo(inputs, options)):
        actual = groups_of(plans_of(inputs, windows, periodic, bool(nested)))
        assert len(actual) == len(groups)
        for found, assumed in zip(actual, groups, strict=True):
            assert found.messages <= assumed.messages
            assert found.received <= assumed.received
            assert found.copied <= assumed.copied
    chosen = costs_less_nested(inputs, options, 4)
    assert len({plan.identity for plan in plans_of(inputs, windows, periodic, chosen)}) == 1


@pytest.mark.parametrize(
    ("extents", "grid", "periodic"),
    [((12,), (4,), (False,)), ((9, 12, 15), (3, 3, 3), (False,) * 3),
     ((8, 8, 8), (2, 2, 2), (True,) * 3), ((4, 20), (1, 5), (True, False))],
)  # fmt: skip
def test_numbers_are_those_of_the_plans(extents, grid, periodic):
    """Exactly, if blocks are even and no worker sends to itself."""
    inputs = Decomposition.balanced(extents, grid)
    windows = tuple(STENCIL if parts > 1 else HaloWidths() for parts in grid)
    for nested, groups in enumerate(groups_of_halo(inputs, Halo(windows, periodic))):
        assert groups_of(plans_of(inputs, windows, periodic, bool(nested))) == groups


@pytest.mark.parametrize(
    ("grid", "block", "channels", "cell_bytes", "nested"),
    [
        # 26 messages of few bytes are slower than 6 in three groups.
        ((3, 3, 3), 16, 1, 4, True),
        ((3, 3, 3), 64, 1, 4, True),
        ((8, 8, 8), 64, 8, 4, True),
        # Two more copies of the block take longer than 20 messages.
        ((3, 3, 3), 64, 64, 4, False),
        ((3, 3, 3), 64, 64, 1, True),
        ((3, 3, 3), 256, 1, 4, False),
        ((3, 3, 3), 128, 1, 4, True),
        # 7, 8 and 11 messages in one group are faster than two or three groups.
        ((2, 2, 2), 16, 1, 4, False),
        ((1, 3, 3), 16, 1, 4, False),
        ((2, 2, 3), 16, 1, 4, False),
        ((2, 3, 3), 16, 1, 4, True),
        # One dim: both are the same group.
        ((1, 1, 8), 16, 1, 4, False),
        ((1, 1, 1), 16, 1, 4, False),
    ],
)
def test_decisions(
    grid: tuple[int, ...], block: int, channels: int, cell_bytes: int, nested: bool
) -> None:
    extents = (channels, *(parts * block for parts in grid))
    inputs = Decomposition.balanced(extents, (1, *grid))
    windows = [SlidingWindow(3, padding=(1, 1)) if n > 1 else HaloWidths() for n in grid]
    assert costs_less_nested(inputs, Halo((HaloWidths(), *windows)), cell_bytes) is nested


def test_uneven_blocks_count_by_the_largest() -> None:
    inputs = Decomposition((Blocks.of_sizes([4, 0, 60, 0, 5]), Blocks(30, 3)))
    (direct,), nested = groups_of_halo(inputs, Halo((HaloWidths(5, 5), STENCIL), (False, True)))
    # The worker with 60 rows receives 4 and 5 rows of 10 columns, and sends to both.
    assert nested == [MessageGroup(2, 9 * 10, 70 * 10), MessageGroup(2, 70 * 2, 70 * 12)]
    assert direct == MessageGroup(8, 69 * 12 - 60 * 10, 70 * 12)
