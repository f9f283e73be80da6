"""Collectives as messages: who sends to whom, and what is summed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gpudist.geometry.boxes import Box, Collective, Stage
from gpudist.geometry.messages import MessageStage, as_messages

MEMBERS, ROOT, SHAPE = (1, 2, 4, 7), 2, (3, 5)
OTHERS = {1, 4, 7}
# Enough to be scattered.
LARGE = (1 << 10, 1 << 9)


def stage_of(collective: Collective, rank: int, shape: tuple[int, ...] = SHAPE) -> Stage:
    is_root, own = rank == collective.root, collective.includes_root
    block = shape if collective.kind == "all_reduce" or not is_root or own else None
    if collective.kind == "broadcast":
        return Stage(shape if is_root else None, block, collectives=(collective,))
    if collective.kind == "reduce":
        return Stage(block, shape if is_root else None, collectives=(collective,))
    return Stage(shape, shape, collectives=(collective,))


def messages_of(collective: Collective) -> dict[int, MessageStage]:
    return {rank: as_messages(stage_of(collective, rank), rank, 8) for rank in MEMBERS}


def pairs(stages: dict[int, MessageStage]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Sender and receiver of every message, by the sender and by the receiver."""
    sent = {(rank, message.peer) for rank, stage in stages.items() for message in stage.sends}
    received = {
        (message.peer, rank) for rank, stage in stages.items() for message in stage.incoming
    }
    return sent, received


@pytest.mark.parametrize("includes_root", [False, True])
def test_a_root_sends_its_block_to_every_other_member(includes_root: bool) -> None:
    stages = messages_of(Collective("broadcast", MEMBERS, ROOT, includes_root))
    expected = {(ROOT, member) for member in OTHERS}
    assert pairs(stages) == (expected, expected)
    assert bool(stages[ROOT].moves) == includes_root
    assert not any(stages[member].moves or stages[member].sums for member in OTHERS)


@pytest.mark.parametrize("includes_root", [False, True])
def test_every_other_member_sends_its_block_to_the_root(includes_root: bool) -> None:
    stages = messages_of(Collective("reduce", MEMBERS, ROOT, includes_root))
    expected = {(member, ROOT) for member in OTHERS}
    assert pairs(stages) == (expected, expected)
    # In ascending order of ranks, the root's own among them.
    peers = [contribution.peer for contribution in stages[ROOT].sums]
    assert peers == ([1, None, 4, 7] if includes_root else [1, 4, 7])
    assert not any(stages[member].sums for member in OTHERS)


def test_of_a_small_all_reduce_everybody_sends_to_everybody() -> None:
    stages = messages_of(Collective("all_reduce", MEMBERS, 1, True))
    expected = {(a, b) for a in MEMBERS for b in MEMBERS if a != b}
    assert pairs(stages) == (expected, expected)
    for rank, stage in stages.items():
        peers = [contribution.peer for contribution in stage.sums]
        assert peers == [None if member == rank else member for member in MEMBERS]


def test_sums_are_sent_on_only_where_nothing_else_is_added() -> None:
    stage = stage_of(Collective("all_reduce", MEMBERS, 1, True), 2, LARGE)
    assert as_messages(stage, 2, 8).relays
    assert not as_messages(stage, 2, 8, from_zero=True).relays
    assert not as_messages(stage, 2, 8, accumulates=True).relays
    assert not as_messages(stage, 2, 8, scatters=False).relays


def test_a_large_all_reduce_sums_a_part_on_every_member_and_sends_it_on() -> None:
    collective = Collective("all_reduce", MEMBERS, 1, True)
    stages = {rank: as_messages(stage_of(collective, rank, LARGE), rank, 8) for rank in MEMBERS}
    parts: list[Box] = []
    for rank, stage in stages.items():
        (part,) = stage.sums[0].destinations
        parts.append(part)
        assert [message.peer for message in stage.relays] == [m for m in MEMBERS if m != rank]
        assert all(message.boxes == (part,) for message in stage.relays)
        assert stage.starts_with_copy and all(c.destinations == (part,) for c in stage.sums)
        for other in stage.relayed:
            assert other.boxes == stages[other.peer].sums[0].destinations
    assert sum(part.volume for part in parts) == LARGE[0] * LARGE[1]


def test_an_empty_block_is_not_sent() -> None:
    collective = Collective("broadcast", MEMBERS, ROOT, True)
    stage = replace(stage_of(collective, ROOT), input_shape=(0, 5), output_shape=(0, 5))
    assert as_messages(stage, ROOT, 8).sends == ()


@pytest.mark.parametrize(("from_zero", "accumulates"), [(True, False), (False, True), (True, True)])
def test_sums_in_a_wider_dtype_or_onto_values_overwrite_nothing(
    from_zero: bool, accumulates: bool
) -> None:
    stage = stage_of(Collective("reduce", MEMBERS, ROOT, True), ROOT)
    plain = as_messages(stage, ROOT, 2)
    assert plain.starts_with_copy and plain.same_cells and not plain.fills
    found = as_messages(stage, ROOT, 2, from_zero, accumulates)
    assert found == replace(plain, starts_with_copy=False)


def test_an_output_that_is_copied_has_no_sums() -> None:
    """Though it would start from zeros."""
    stage = stage_of(Collective("broadcast", MEMBERS, ROOT, True), 4)
    assert as_messages(stage, 4, 2, from_zero=True) == as_messages(stage, 4, 2)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1 << 15,), 0),
        ((32, 1 << 10), 0),
        ((31, 1058), 1),
        ((3, 40, 300), 1),
        # None has eight cells for every member: the longest.
        ((7, 31, 30, 30), 1),
        # And here two members have no part.
        ((2,) * 15, 0),
    ],
)
def test_a_scattered_sum_is_the_sum(shape: tuple[int, ...], dim: int) -> None:
    """Every member adds the parts along one dim in ascending order of ranks."""
    collective = Collective("all_reduce", MEMBERS, ROOT, True)
    stages = {rank: as_messages(stage_of(collective, rank, shape), rank, 8) for rank in MEMBERS}
    x = {rank: np.arange(math.prod(shape)).reshape(shape) * 10**i for i, rank in enumerate(MEMBERS)}
    y = {rank: np.full(shape, -1) for rank in MEMBERS}
    sent = {
        (rank, message.peer): x[rank][message.boxes[0].slices]
        for rank, stage in stages.items()
        for message in stage.sends
    }
    for rank, stage in stages.items():
        assert not (stage.fills or stage.moves or stage.receives) and stage.starts_with_copy
        senders = [rank if s.peer is None else s.peer for s in stage.sums]
        assert senders == (list(MEMBERS) if senders else [])
        for number, contribution in enumerate(stage.sums):
            (box,) = contribution.destinations
            if contribution.peer is None:
                assert contribution.sources == (box,)
                added = x[rank][box.slices]
            else:
                added = sent.pop((contribution.peer, rank))
            y[rank][box.slices] = added if number == 0 else y[rank][box.slices] + added
            assert box.shape == (*shape[:dim], box.shape[dim], *shape[dim + 1 :])
    assert not sent
    relayed = {
        (rank, message.peer): y[rank][message.boxes[0].slices]
        for rank, stage in stages.items()
        for message in stage.relays
    }
    for rank, stage in stages.items():
        for message in stage.relayed:
            y[rank][message.boxes[0].slices] = relayed.pop((message.peer, rank))
        assert np.array_equal(y[rank], sum(x.values()))
    assert not relayed


def test_where_a_sum_is_scattered() -> None:
    collective = Collective("all_reduce", MEMBERS, ROOT, True)
    for cells, is_scattered in (((1 << 15) - 1, False), (1 << 15, True)):
        messages = as_messages(stage_of(collective, ROOT, (cells,)), ROOT, 8)
        assert bool(messages.relays) == is_scattered
