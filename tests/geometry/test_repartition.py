from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry import Blocks, Box, Decomposition, Plan, plan_all_gather, plan_repartition
from gpudist.geometry.cartesian import index_of, rank_of, size_of
from gpudist.geometry.repartition import overlaps
from tests.geometry.oracle import PerRank, assert_linear_operator, carry_out, exactly, numbered
from tests.geometry.strategies import decompositions, shapes, workers


@st.composite
def repartitions(draw: st.DrawFn):
    """Two cuts of one tensor, and the world ranks of the workers of either."""
    shape = draw(shapes())
    source, target = draw(decompositions(shape)), draw(decompositions(shape))
    sizes = size_of(source.grid), size_of(target.grid)
    world = draw(st.integers(max(sizes), sum(sizes) + 1))
    return source, target, *(draw(workers(size, world)) for size in sizes), world


def index_on(grid: tuple[int, ...], ranks: list[int], rank: int) -> tuple[int, ...] | None:
    return index_of(ranks.index(rank), grid) if rank in ranks else None


def repartition_plans(source, target, sources, targets, world) -> list[Plan]:
    return [
        plan_repartition(
            source,
            target,
            rank,
            index_on(source.grid, sources, rank),
            index_on(target.grid, targets, rank),
            lambda index: sources[rank_of(index, source.grid)],
            lambda index: targets[rank_of(index, target.grid)],
            (tuple(sources), tuple(targets)),
        )
        for rank in range(world)
    ]


def blocks_on(cut: Decomposition, ranks: list[int], world: int) -> PerRank:
    array = numbered(cut.shape)
    indices = [index_on(cut.grid, ranks, rank) for rank in range(world)]
    return [None if i is None else array[cut.block(i).slices] for i in indices]


@exactly
@given(repartitions())
def test_every_target_gets_its_block_and_no_other_worker_gets_anything(case):
    source, target, sources, targets, world = case
    outputs = carry_out(repartition_plans(*case), blocks_on(source, sources, world))
    expected = blocks_on(target, targets, world)
    assert [output is None for output in outputs] == [block is None for block in expected]
    for output, block in zip(outputs, expected, strict=True):
        if block is not None:
            np.testing.assert_array_equal(output, block)


@exactly
@given(repartitions())
def test_the_transposed_repartition_is_the_repartition_back(case):
    source, target, sources, targets, world = case
    plans = repartition_plans(*case)
    assert_linear_operator(plans)
    back = repartition_plans(target, source, targets, sources, world)
    outputs = carry_out([plan.T for plan in plans], blocks_on(target, targets, world))
    for output, block in zip(
        outputs, carry_out(back, blocks_on(target, targets, world)), strict=True
    ):
        assert (output is None) == (block is None)
        if block is not None:
            np.testing.assert_array_equal(output, block)


def test_every_block_of_a_repartition_is_written_without_clearing():
    source = Decomposition.balanced((4, 6), (2, 1))
    target = Decomposition.balanced((4, 6), (1, 3))
    plans = repartition_plans(source, target, [0, 1], [1, 2, 3], 4)
    assert [plan.stages[0].covers_output for plan in plans] == [False, True, True, True]
    assert plans[0].output_shape is None
    assert [len(plan.stages[0].sends) for plan in plans] == [3, 2, 0, 0]
    assert [len(plan.stages[0].moves) for plan in plans] == [0, 1, 0, 0]


def test_workers_in_neither_cut_have_an_identity():
    cut = Decomposition.balanced((4,), (2,))
    plans = repartition_plans(cut, cut, [0, 1], [0, 1], 3)
    assert all(plan.is_identity for plan in plans)
    assert (plans[2].input_shape, plans[2].output_shape) == (None, None)


def test_cuts_of_different_tensors_are_refused():
    cuts = Decomposition.balanced((4,), (2,)), Decomposition.balanced((5,), (2,))
    with pytest.raises(ShapeError, match=r"global shape \[4\] into blocks of one of shape \[5\]"):
        repartition_plans(*cuts, [0, 1], [0, 1], 2)


def test_overlaps_lists_owners_and_common_cells():
    cut = Decomposition((Blocks.of_sizes([2, 0, 3]), Blocks(4, 2)))
    assert overlaps(Box((1, 1), (3, 2)), cut) == [
        ((0, 0), Box((1, 1), (2, 2))),
        ((2, 0), Box((2, 1), (3, 2))),
    ]


@st.composite
def gathers(draw: st.DrawFn):
    inputs = draw(decompositions())
    return inputs, draw(st.lists(st.sampled_from(range(len(inputs.shape))), unique=True))


def gather_plans(inputs: Decomposition, axes: list[int]) -> list[Plan]:
    return [plan_all_gather(inputs, axes, i) for i in product(*map(range, inputs.grid))]


@exactly
@given(gathers())
def test_all_gather_gives_all_blocks_along_its_axes(case):
    inputs, axes = case
    array = numbered(inputs.shape)
    owned = [inputs.block(index) for index in product(*map(range, inputs.grid))]
    outputs = carry_out(gather_plans(inputs, axes), [array[box.slices] for box in owned])
    for output, box in zip(outputs, owned, strict=True):
        whole = tuple(slice(None) if d in axes else s for d, s in enumerate(box.slices))
        np.testing.assert_array_equal(output, array[whole])


@exactly
@given(gathers())
def test_the_transposed_all_gather_is_a_sum_scatter(case):
    assert_linear_operator(gather_plans(*case))


def test_axes_are_a_set():
    inputs = Decomposition.balanced((4, 4), (2, 2))
    assert plan_all_gather(inputs, [1, 0, 1], (0, 0)) == plan_all_gather(inputs, (0, 1), (0, 0))
    assert plan_all_gather(inputs, [], (0, 0)).is_identity


@pytest.mark.parametrize("axes", [[2], [-1], [0, 5]])
def test_axes_that_the_partition_lacks_are_refused(axes: list[int]):
    inputs = Decomposition.balanced((4, 4), (2, 2))
    with pytest.raises(PartitionError, match="the partition has 2 axes"):
        plan_all_gather(inputs, axes, (0, 0))


def test_different_cuts_have_different_identities():
    source = Decomposition.balanced((4, 4), (2, 1))
    targets = [
        Decomposition.balanced((4, 4), (1, 2)),
        Decomposition((Blocks(4, 1), Blocks.of_sizes([1, 3]))),
        source,
    ]
    plans = [repartition_plans(source, target, [0, 1], [0, 1], 2)[0] for target in targets]
    plans.append(repartition_plans(source, targets[0], [0, 1], [1, 0], 2)[0])
    plans += [plan_all_gather(source, axes, (0, 0)) for axes in ([], [0], [1], [0, 1])]
    assert len({p.identity for plan in plans for p in (plan, plan.T)}) == 2 * len(plans)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_whose_adjoint_adds(size: int):
    """The adjoint of sending to several places adds; that of a single copy overwrites."""
    (gathered,) = plan_all_gather(Decomposition.balanced((5,), (size,)), [0], (0,)).stages
    assert gathered.sources_overlap == (size > 1)
