from __future__ import annotations

import tracemalloc
from itertools import product
from math import prod
from statistics import median
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.geometry import (
    Blocks,
    Decomposition,
    Halo,
    HaloWidths,
    Plan,
    SlidingWindow,
    TransposedWindow,
    Window,
    balanced_block,
    halo,
    plan_halo,
)
from tests.geometry.oracle import assert_linear_operator, carry_out, cut, exactly, numbered
from tests.geometry.strategies import cuts, decompositions, sliding_windows, windows


@st.composite
def cases(draw: st.DrawFn):
    """A decomposition, a window per dim and the dims that wrap."""
    inputs = draw(decompositions())
    chosen = tuple(draw(windows(extent)) for extent in inputs.shape)
    return inputs, chosen, tuple(draw(st.booleans()) for _ in chosen)


def workers_of(inputs: Decomposition) -> list[tuple[int, ...]]:
    return list(product(*map(range, inputs.grid)))


def plans_of(inputs, chosen, periodic=(), nested=False) -> list[Plan]:
    options = Halo(tuple(chosen), periodic, nested)
    return [plan_halo(inputs, options, index) for index in workers_of(inputs)]


def needed_by_rule(blocks: Blocks, window: Window, index: int) -> tuple[int, int]:
    """The needed range in the words of the rule; empty ranges have no place of their own."""
    if isinstance(window, HaloWidths):
        start, stop = blocks.block(index)
        low, high = start - window.left, stop + window.right
        return (low, high) if start < stop and low < high else (0, 0)
    assert isinstance(window, SlidingWindow | TransposedWindow)
    outputs = window.output_extent(blocks.extent)
    start, stop = balanced_block(outputs, blocks.parts, index)
    if start == stop:
        return 0, 0
    if isinstance(window, SlidingWindow):
        left = window.padding[0]
        span = window.dilation * (window.kernel - 1)
        return start * window.stride - left, (stop - 1) * window.stride - left + span + 1
    reached = [i * window.stride - window.padding for i in range(blocks.extent)]
    span = window.dilation * (window.kernel - 1)
    read = [i for i, first in enumerate(reached) if first < stop and first + span >= start]
    return (read[0], read[-1] + 1) if read else (0, 0)


@exactly
@given(cases())
def test_every_worker_gets_exactly_the_cells_its_windows_read(case):
    inputs, chosen, periodic = case
    array = numbered(inputs.shape)
    blocks = [array[inputs.block(index).slices] for index in workers_of(inputs)]
    wanted = [
        cut(array, list(map(needed_by_rule, inputs.dims, chosen, index)), periodic)
        for index in workers_of(inputs)
    ]
    for nested in (False, True):
        plans = plans_of(inputs, chosen, periodic, nested)
        for output, expected in zip(carry_out(plans, blocks), wanted, strict=True):
            np.testing.assert_array_equal(output, expected)


@exactly
@given(cases(), st.booleans())
def test_the_transposed_plan_is_the_transposed_matrix(case, nested: bool):
    inputs, chosen, periodic = case
    assert_linear_operator(plans_of(inputs, chosen, periodic, nested))


# Halo widths (left, right) of each worker; negative ones are cells of the own block it drops.
GOLDEN = {
    "k5p2 n11 P3": (SlidingWindow(5, padding=(2, 2)), 11, [(0, 2), (2, 2), (2, 0)]),
    "k5p0 n11 P3": (SlidingWindow(5), 11, [(0, 3), (1, 1), (3, 0)]),
    "k2s2 n10 P3": (SlidingWindow(2, stride=2), 10, [(0, 0), (0, 1), (-1, 0)]),
    "k2s2 n20 P6": (
        SlidingWindow(2, stride=2),
        20,
        [(0, 0), (0, 0), (0, 1), (-1, 2), (-2, 1), (-1, 0)],
    ),
}


@pytest.mark.parametrize(("window", "extent", "halos"), GOLDEN.values(), ids=GOLDEN.keys())
def test_halos_of_the_paper_before_padding_is_added(window, extent, halos):
    blocks = Blocks(extent, len(halos))
    for index, (left, right) in enumerate(halos):
        owned, needed = blocks.block(index), halo.needed_range(blocks, window, index)
        low, high = max(needed[0], 0), min(needed[1], extent)
        assert (owned[0] - low, high - owned[1]) == (left, right)
        plan = plan_halo(Decomposition((blocks,)), Halo((window,)), [index])
        received = sum(message.volume for message in plan.stages[0].receives)
        assert received == max(left, 0) + max(right, 0)
        assert plan.output_shape == (needed[1] - needed[0],)


@pytest.mark.parametrize(
    ("nested", "interior", "corner"), [(False, [[26]], [[7]]), (True, [[2] * 3], [[1] * 3])]
)
def test_one_stage_talks_to_all_neighbours_and_nested_stages_to_two_a_dim(nested, interior, corner):
    inputs = Decomposition.balanced((1, 9, 9, 9), (1, 3, 3, 3))
    chosen = (HaloWidths(), *[SlidingWindow(3, padding=(1, 1))] * 3)
    for index, peers in (((0, 1, 1, 1), interior), ((0, 0, 0, 0), corner)):
        plan = plan_halo(inputs, Halo(chosen, nested=nested), index)
        assert [[len(stage.receives) for stage in plan.stages]] == peers
        assert [[len(stage.sends) for stage in plan.stages]] == peers


def test_a_halo_wider_than_a_block_is_fetched_from_further_workers():
    inputs = Decomposition.balanced((5,), (5,))
    plan = plan_halo(inputs, Halo((HaloWidths(3, 1),)), [3])
    assert [message.peer for message in plan.stages[0].receives] == [0, 1, 2, 4]
    assert [message.peer for message in plan.stages[0].sends] == [2, 4]


def test_a_periodic_axis_wraps_to_the_worker_itself_too():
    alone = Decomposition.balanced((3,), (1,))
    plan = plan_halo(alone, Halo((HaloWidths(4, 1),), periodic=(True,)), [0])
    assert not plan.stages[0].communicates
    output = carry_out([plan], [np.array([1, 2, 3])])[0]
    np.testing.assert_array_equal(output, [3, 1, 2, 3, 1, 2, 3, 1])


def test_a_worker_without_output_needs_nothing_and_still_gives():
    inputs = Decomposition.balanced((4,), (4,))
    plans = plans_of(inputs, [SlidingWindow(2, stride=2)])
    assert [plan.output_shape for plan in plans] == [(2,), (2,), (0,), (0,)]
    assert [message.peer for message in plans[3].stages[0].sends] == [1]


def test_a_block_may_read_padding_only():
    inputs = Decomposition.balanced((1,), (5,))
    plans = plans_of(inputs, [SlidingWindow(1, padding=(4, 0))])
    outputs = carry_out(plans, [np.array([7]), *[np.array([], dtype=int)] * 4])
    assert [output.tolist() for output in outputs] == [[0], [0], [0], [0], [7]]


@pytest.mark.parametrize("nested", [False, True])
def test_no_halo_at_all_is_the_identity(nested: bool):
    inputs = Decomposition.balanced((4, 6), (2, 3))
    plans = plans_of(inputs, [HaloWidths(), SlidingWindow(1)], nested=nested)
    assert all(plan.is_identity and plan.T.is_identity for plan in plans)
    assert not plan_halo(inputs, Halo((HaloWidths(), HaloWidths(1))), (0, 1)).is_identity


def test_a_kernel_that_does_not_fit_fails_on_every_worker_alike():
    inputs = Decomposition.balanced((3,), (4,))
    for index in range(4):
        with pytest.raises(ValueError, match="needs 5 cells but the padded global extent is 4"):
            plan_halo(inputs, Halo((SlidingWindow(5, padding=(1, 0)),)), [index])


def test_different_halos_have_different_identities():
    inputs = Decomposition.balanced((8, 8), (2, 2))
    chosen = (HaloWidths(1, 1), SlidingWindow(3))
    uneven = Decomposition((Blocks.of_sizes([3, 5]), Blocks(8, 2)))
    plans = [
        plan_halo(inputs, Halo(chosen), (0, 0)),
        plan_halo(inputs, Halo(chosen, nested=True), (0, 0)),
        plan_halo(inputs, Halo(chosen, periodic=(True, False)), (0, 0)),
        plan_halo(inputs, Halo((chosen[0], SlidingWindow(3, padding=(1, 1)))), (0, 0)),
        plan_halo(inputs, Halo((chosen[0], TransposedWindow(3))), (0, 0)),
        plan_halo(uneven, Halo(chosen), (0, 0)),
    ]
    identities = {p.identity for plan in plans for p in (plan, plan.T)}
    assert len(identities) == 2 * len(plans)


def plan_in_the_middle(workers: int) -> Plan:
    inputs = Decomposition.balanced((1, 1, 512, 512, 512), (1, 1, *[workers] * 3))
    chosen = (*[HaloWidths()] * 2, *[SlidingWindow(3, padding=(1, 1))] * 3)
    return plan_halo(inputs, Halo(chosen), (0, 0, *[workers // 2] * 3))


def test_planning_takes_time_by_peers_and_not_by_ranks():
    def median_s(workers: int) -> float:
        times: list[float] = []
        for _ in range(20):
            start = perf_counter()
            plan_in_the_middle(workers)
            times.append(perf_counter() - start)
        return median(times)

    pairs = [(median_s(16), median_s(64)) for _ in range(20)]
    small, large = (min(times) for times in zip(*pairs, strict=True))
    assert small < 1e-3
    assert large < 2 * small


def test_planning_never_looks_at_workers_that_are_no_peers(monkeypatch: pytest.MonkeyPatch):
    ranks: list[int] = []

    def counted(index, shape, rank_of=halo.rank_of):
        ranks.append(rank_of(index, shape))
        return ranks[-1]

    monkeypatch.setattr(halo, "rank_of", counted)
    plan = plan_in_the_middle(64)
    peers = {message.peer for message in plan.stages[0].receives}
    assert len(peers) == 26
    assert set(ranks) == {*peers, plan.rank}
    assert len(ranks) == 2 * 27 + 1


def test_planning_keeps_no_list_of_ranks():
    plan_in_the_middle(64)
    tracemalloc.start()
    try:
        plan_in_the_middle(64)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


@exactly
@given(cases())
def test_workers_own_what_they_read_or_read_a_cell_of_others(case):
    inputs, chosen, _ = case
    for blocks, window in zip(inputs.dims, chosen, strict=True):
        expected = all(
            start <= cell < stop
            for index in range(blocks.parts)
            for start, stop in [blocks.block(index)]
            for cell in range(*needed_by_rule(blocks, window, index))
        )
        assert halo.owns_what_it_reads(blocks, window) == expected


@exactly
@given(st.data())
def test_own_paddings_give_the_own_outputs(data):
    extent = data.draw(st.integers(1, 14))
    blocks, window = data.draw(cuts(extent)), data.draw(sliding_windows(extent))
    inputs = Decomposition((Blocks(2, 1), blocks))
    chosen = (HaloWidths(), window)
    per_rank = [halo.own_paddings(inputs, chosen, index) for index in workers_of(inputs)]
    outputs = window.outputs(blocks)

    def fits(worker: int, padding: int) -> bool:
        (first, last), (start, stop) = blocks.block(worker), outputs.block(worker)
        if start == stop:
            return padding == 0
        padded = last - first + 2 * padding
        return (
            last > first
            and padded >= window.reach
            and (padded - window.reach) // window.stride + 1 == stop - start
            and first - padding == start * window.stride - window.padding[0]
        )

    for worker, own in enumerate(per_rank):
        assert (own is None) == (per_rank[0] is None)
        if own is not None:
            assert len(own) == 1 and fits(worker, own[0])
    if per_rank[0] is None:
        widest = 20 + prod(inputs.shape)
        assert not all(
            any(fits(worker, padding) for padding in range(widest))
            for worker in range(blocks.parts)
        )


def test_own_paddings_of_common_windows():
    inputs = Decomposition.balanced((1, 12, 12), (1, 2, 3))
    for window, expected in (
        (SlidingWindow(3, padding=(1, 1)), (1, 1)),
        (SlidingWindow(1), (0, 0)),
        (SlidingWindow(2, 2), (0, 0)),
        (SlidingWindow(3, 2, padding=(1, 1)), (1, 1)),
        (SlidingWindow(3, dilation=2, padding=(2, 2)), (2, 2)),
        (SlidingWindow(3), None),
        (SlidingWindow(2, padding=(0, 1)), None),
    ):
        for index in workers_of(inputs):
            assert halo.own_paddings(inputs, [HaloWidths(), window, window], index) == expected


def test_own_paddings_where_there_is_no_block():
    """The padding of a worker without outputs belongs to nobody, and the others have theirs."""
    assert halo.axis_paddings(Blocks(2, 3), SlidingWindow(1)) == (0, 0, 0)
    assert halo.axis_paddings(Blocks(2, 3), SlidingWindow(3, padding=(1, 1))) == (1, 1, 0)
