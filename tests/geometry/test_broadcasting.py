from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.errors import PartitionError
from gpudist.geometry import Pairing, Plan, plan_all_sum_reduce, plan_broadcast
from gpudist.geometry.cartesian import size_of
from tests.geometry.oracle import PerRank, assert_linear_operator, carry_out, exactly
from tests.geometry.strategies import workers


def numbers_by_rule(
    shape: tuple[int, ...], transposed: bool, matching: list[int], dim: int
) -> list[int]:
    """Return the number of every worker of a grid, in the words of the broadcast rule."""
    numbers: list[int] = []
    for index in np.ndindex(shape):
        effective_shape, effective = (shape[::-1], index[::-1]) if transposed else (shape, index)
        padded_shape = (1,) * (dim - len(shape)) + effective_shape
        padded = (0,) * (dim - len(shape)) + effective
        number, step = 0, 1
        for axis in matching if transposed else reversed(matching):
            number += step * padded[axis]
            step *= padded_shape[axis]
        numbers.append(number)
    return numbers


def sources_by_rule(
    source: tuple[int, ...], target: tuple[int, ...], transpose_source: bool, transpose_target: bool
) -> list[int]:
    """Return the source rank with the same number, for every target rank."""
    dim = len(target)
    left = source[::-1] if transpose_source else source
    left = (1,) * (dim - len(left)) + left
    right = target[::-1] if transpose_target else target
    matching = [axis for axis in range(dim) if left[axis] == right[axis]]
    numbers = numbers_by_rule(source, transpose_source, matching, dim)
    assert sorted(numbers) == list(range(len(numbers)))
    return [
        numbers.index(number) for number in numbers_by_rule(target, transpose_target, matching, dim)
    ]


@st.composite
def pairings(draw: st.DrawFn) -> Pairing:
    """Grids of at most 24 workers of which the first broadcasts to the second."""
    target = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda s: size_of(s) < 25)
    )
    source = [draw(st.sampled_from([1, extent])) for extent in target]
    while len(source) > 1 and source[0] == 1 and draw(st.booleans()):
        source.pop(0)
    flip = draw(st.booleans()), draw(st.booleans())
    return Pairing(
        tuple(source[::-1] if flip[0] else source),
        tuple(target[::-1] if flip[1] else target),
        *flip,
    )


def assert_pairs(pairing: Pairing, sources: list[int]) -> None:
    assert [pairing.source_of(rank) for rank in range(size_of(pairing.target))] == sources
    for source in range(size_of(pairing.source)):
        expected = tuple(rank for rank, root in enumerate(sources) if root == source)
        assert pairing.targets_of(source) == expected


@exactly
@given(pairings())
def test_workers_of_the_same_number_match(pairing: Pairing):
    assert_pairs(
        pairing,
        sources_by_rule(
            pairing.source, pairing.target, pairing.transpose_source, pairing.transpose_target
        ),
    )


def test_3x4_to_4x3_with_transposed_source_pairs_equal_ranks():
    assert_pairs(Pairing((3, 4), (4, 3), transpose_source=True), list(range(12)))


# Source rank of every target rank.
TABLES = {
    "plain": (Pairing((3, 4), (3, 4)), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    "target": (
        Pairing((3, 4), (4, 3), transpose_target=True),
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    ),
    "both": (Pairing((3, 4), (3, 4), True, True), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    "column to grid": (Pairing((3, 1), (3, 2)), [0, 0, 1, 1, 2, 2]),
    "row to grid": (Pairing((1, 2), (3, 2)), [0, 1, 0, 1, 0, 1]),
    "row, as a column": (Pairing((1, 3), (3, 2), True), [0, 0, 1, 1, 2, 2]),
    "row to a grid read as its transpose": (
        Pairing((1, 2), (2, 3), transpose_target=True),
        [0, 0, 0, 1, 1, 1],
    ),
    "size alone": (Pairing((3,), (2, 3)), [0, 1, 2, 0, 1, 2]),
    "two matching axes of three, transposed": (
        Pairing((2, 1, 3), (3, 2, 2), transpose_source=True),
        [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5],
    ),
}


@pytest.mark.parametrize(("pairing", "sources"), TABLES.values(), ids=TABLES.keys())
def test_who_talks_to_whom(pairing: Pairing, sources: list[int]):
    assert_pairs(pairing, sources)
    assert sources == sources_by_rule(
        pairing.source, pairing.target, pairing.transpose_source, pairing.transpose_target
    )


@pytest.mark.parametrize(
    ("source", "target", "transposes"),
    [
        ((2,), (3,), (False, False)),
        ((3, 2), (3, 1), (False, False)),
        ((2, 1), (2,), (False, False)),
        ((1, 3), (3,), (False, False)),
        ((2, 3), (2, 3), (True, False)),
        ((2, 3), (2, 3), (False, True)),
        ((3, 1), (3, 2), (True, False)),
    ],
)
def test_grids_that_do_not_broadcast_are_refused(source, target, transposes):
    with pytest.raises(PartitionError, match=r"each axis .*must be 1 or equal") as error:
        Pairing(source, target, *transposes)
    assert str(list(source)) in str(error.value)
    assert str(list(target)) in str(error.value)


@st.composite
def broadcasts(draw: st.DrawFn):
    """A pairing on random rank sets, and a block shape for every source."""
    pairing = draw(pairings())
    sizes = size_of(pairing.source), size_of(pairing.target)
    world = draw(st.integers(max(sizes), max(sizes) + min(sizes) + 1))
    dim = draw(st.integers(1, 2))
    shape = st.tuples(*[st.integers(0, 2)] * dim)
    shapes = draw(st.lists(shape, min_size=sizes[0], max_size=sizes[0]))
    return pairing, *(draw(workers(size, world)) for size in sizes), shapes, world


def broadcast_plans(pairing, sources, targets, shapes, world) -> list[Plan]:
    def copies(source: int) -> tuple[int, ...]:
        return tuple(targets[rank] for rank in pairing.targets_of(source))

    plans: list[Plan] = []
    for rank in range(world):
        own = sources.index(rank) if rank in sources else None
        root = pairing.source_of(targets.index(rank)) if rank in targets else None
        plans.append(
            plan_broadcast(
                rank,
                None if own is None else copies(own),
                None if root is None else sources[root],
                () if root is None else copies(root),
                None if own is None else shapes[own],
                None if root is None else shapes[root],
                ("broadcast", pairing, tuple(sources), tuple(targets)),
            )
        )
    return plans


def random_blocks(ranks: list[int], shapes, world: int) -> PerRank:
    generator = np.random.default_rng(0)
    return [
        generator.integers(1, 1000, shapes[ranks.index(rank)]) if rank in ranks else None
        for rank in range(world)
    ]


@exactly
@given(broadcasts())
def test_every_target_gets_a_copy_of_its_sources_block(case):
    pairing, sources, targets, shapes, world = case
    blocks = random_blocks(sources, shapes, world)
    outputs = carry_out(broadcast_plans(*case), blocks)
    for rank, output in enumerate(outputs):
        if rank in targets:
            root = pairing.source_of(targets.index(rank))
            np.testing.assert_array_equal(output, blocks[sources[root]])
        else:
            assert output is None


@exactly
@given(broadcasts())
def test_the_transposed_broadcast_sums_into_the_source(case):
    pairing, sources, targets, shapes, world = case
    summands = [shapes[pairing.source_of(rank)] for rank in range(len(targets))]
    blocks = random_blocks(targets, summands, world)
    outputs = carry_out([plan.T for plan in broadcast_plans(*case)], blocks)
    for rank, output in enumerate(outputs):
        if rank in sources:
            copies = pairing.targets_of(sources.index(rank))
            np.testing.assert_array_equal(output, sum(blocks[targets[t]] for t in copies))
        else:
            assert output is None


@exactly
@given(broadcasts())
def test_sum_reduce_is_the_transposed_matrix(case):
    assert_linear_operator(broadcast_plans(*case))


def test_groups_of_more_than_two_are_collectives_and_smaller_ones_messages():
    plans = broadcast_plans(Pairing((2, 1), (2, 2)), [0, 1], [0, 2, 1, 3], [(4,), (5,)], 4)
    assert not any(plan.stages[0].collectives for plan in plans)
    assert [m.peer for m in plans[0].stages[0].sends] == [2]
    plans = broadcast_plans(Pairing((1,), (3,)), [3], [0, 1, 2], [(4,)], 4)
    assert all(len(plan.stages[0].collectives) == 1 for plan in plans)
    (collective,) = plans[0].stages[0].collectives
    assert (collective.members, collective.root) == ((0, 1, 2, 3), 3)
    assert not collective.includes_root


def test_a_broadcast_to_itself_is_the_identity():
    plans = broadcast_plans(Pairing((2, 2), (2, 2)), [0, 1, 2, 3], [0, 1, 2, 3], [(3,)] * 4, 4)
    assert all(plan.is_identity and plan.T.is_identity for plan in plans)


@exactly
@given(st.integers(1, 6), st.sampled_from([(), (0,), (3,), (2, 2)]))
def test_all_sum_reduce_is_its_own_adjoint(size: int, shape: tuple[int, ...]):
    members = range(size)
    plans = [plan_all_sum_reduce(rank, members, shape, ("sum", size, shape)) for rank in members]
    blocks = random_blocks(list(members), [shape] * size, size)
    for outputs in (carry_out(plans, blocks), carry_out([plan.T for plan in plans], blocks)):
        for output in outputs:
            np.testing.assert_array_equal(output, sum(blocks))
    assert_linear_operator(plans)
    assert [plan.T.stages for plan in plans] == [plan.stages for plan in plans]


def test_all_sum_reduce_over_groups_sums_each_alone():
    groups = [(2, 0), (1, 3)]
    plans = [plan_all_sum_reduce(r, groups[r % 2], (2,), ("sum", 2)) for r in range(4)]
    outputs = carry_out(plans, [np.full(2, 10**rank) for rank in range(4)])
    assert [output[0] for output in outputs] == [101, 1010, 101, 1010]


def test_partitions_that_do_not_broadcast_are_told_as_they_were_given():
    with pytest.raises(PartitionError, match=r"shape \[2, 3\] \(transposed\) does .* \[2, 3\]: "):
        Pairing((2, 3), (2, 3), transpose_source=True)
    with pytest.raises(PartitionError, match=r"shape \[2, 3\] does .* \[2, 3\] \(transposed\): "):
        Pairing((2, 3), (2, 3), transpose_target=True)
