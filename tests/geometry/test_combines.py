from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.geometry import Box, Decomposition, Halo, HaloWidths, Message, Move, Stage, plan_halo
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.geometry.combines import Combine, Source, combines
from gpudist.geometry.messages import Contribution, MessageStage, as_messages
from tests.geometry.oracle import exactly

INPUT_SHAPE = (7, 6)
OUTPUT_SHAPE = (6, 5)
OLD, FILL = 1000.0, -1.0


def test_sums_that_are_sent_on_are_refused():
    message = Message(1, (Box((0,), (2,)),))
    for stage in (MessageStage(relays=(message,)), MessageStage(relayed=(message,))):
        with pytest.raises(ValueError, match="a relayed sum is not complete when it is sent"):
            combines(stage)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], extents: tuple[int, ...] | None = None) -> Box:
    """Return a box within ``shape``, of the given extents or of any, some of them zero."""
    if extents is None:
        extents = tuple(draw(st.integers(0, n)) for n in shape)
    start = tuple(draw(st.integers(0, n - m)) for n, m in zip(shape, extents, strict=True))
    return Box(start, tuple(a + m for a, m in zip(start, extents, strict=True)))


@st.composite
def adding_stages(draw: st.DrawFn) -> Stage:
    """Copies and messages that go to the same cells."""
    destinations = draw(st.lists(boxes(OUTPUT_SHAPE), max_size=3))
    moves = [Move(draw(boxes(INPUT_SHAPE, box.shape)), box) for box in destinations]
    receives = [
        Message(peer, tuple(draw(st.lists(boxes(OUTPUT_SHAPE), min_size=1, max_size=3))))
        for peer in draw(st.sets(st.sampled_from([0, 1, 3, 4]), max_size=4))
    ]
    receives.sort(key=lambda message: message.peer)
    return Stage(
        INPUT_SHAPE, OUTPUT_SHAPE, tuple(moves), (), tuple(receives), destinations_overlap=True
    )


@st.composite
def copying_stages(draw: st.DrawFn) -> Stage:
    """Disjoint boxes, some copied, some received, some left to fills."""
    rows = draw(st.lists(st.integers(0, OUTPUT_SHAPE[0]), min_size=2, max_size=4))
    cuts = sorted(rows)
    moves, receives = [], []
    for i, (a, b) in enumerate(pairwise(cuts)):
        box = Box((a, 0), (b, draw(st.integers(0, OUTPUT_SHAPE[1]))))
        if draw(st.booleans()):
            moves.append(Move(draw(boxes(INPUT_SHAPE, box.shape)), box))
        elif box.volume:
            receives.append(Message(i, (box,)))
    return Stage(INPUT_SHAPE, OUTPUT_SHAPE, tuple(moves), (), tuple(receives))


def random_cells(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def packed_messages(stage: MessageStage) -> list[list[np.ndarray]]:
    return [
        [random_cells(97 * i + part, box.shape) for part, box in enumerate(message.boxes)]
        for i, message in enumerate(stage.incoming)
    ]


def plainly(stage: MessageStage, block: np.ndarray, old: np.ndarray) -> np.ndarray:
    """The output, one thing after the other."""
    output = old.copy()
    messages = iter(packed_messages(stage))
    for box in stage.fills:
        output[box.slices] = 0 if stage.sums else FILL
    for move in stage.moves:
        output[move.destination.slices] = block[move.source.slices]
    for message in stage.receives:
        for box, cells in zip(message.boxes, next(messages), strict=True):
            output[box.slices] = cells
    for i, contribution in enumerate(stage.sums):
        if contribution.peer is None:
            parts = [block[box.slices] for box in contribution.sources]
        else:
            parts = next(messages)
        for box, cells in zip(contribution.destinations, parts, strict=True):
            if i == 0 and stage.starts_with_copy:
                output[box.slices] = cells
            else:
                output[box.slices] += cells
    return output


def combined(
    stage: MessageStage, made: tuple[Combine, ...], block: np.ndarray, old: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The output by ``made``, and how often each of its cells is written."""
    output, written = old.copy(), np.zeros(old.shape, dtype=int)
    messages = packed_messages(stage)
    for combine in made:
        place = combine.destination.slices
        written[place] += 1
        if not combine.sources:
            output[place] = 0 if stage.sums else FILL
        for i, source in enumerate(combine.sources):
            assert source.box.shape == combine.destination.shape
            if source.of_output:
                assert source.message is None
                cells = old[source.box.slices]
            elif source.message is None:
                cells = block[source.box.slices]
            else:
                cells = messages[source.message][source.part][source.box.slices]
            output[place] = cells if i == 0 else output[place] + cells
    return output, written


def named_cells(stage: MessageStage, shape: tuple[int, ...]) -> np.ndarray:
    named = np.zeros(shape, dtype=bool)
    all_boxes = [*stage.fills, *(move.destination for move in stage.moves)]
    all_boxes += [box for message in stage.receives for box in message.boxes]
    all_boxes += [box for contribution in stage.sums for box in contribution.destinations]
    for box in all_boxes:
        named[box.slices] = True
    return named


def assert_same_as_plainly(stage: MessageStage, accumulates: bool = False, old=0.0) -> None:
    block = random_cells(5, INPUT_SHAPE)
    before = np.full(OUTPUT_SHAPE, old, dtype=np.float32)
    output, written = combined(stage, combines(stage, accumulates), block, before)
    np.testing.assert_array_equal(written, named_cells(stage, OUTPUT_SHAPE).astype(int))
    np.testing.assert_array_equal(output, plainly(stage, block, before))


@exactly
@given(st.one_of(adding_stages(), copying_stages()))
def test_combines_give_the_bits_of_one_addition_after_the_other(stage):
    messages = as_messages(stage, 2, 4)
    assert_same_as_plainly(messages)
    whole = np.ones(OUTPUT_SHAPE, dtype=bool)
    np.testing.assert_array_equal(named_cells(messages, OUTPUT_SHAPE), whole)


@exactly
@given(adding_stages())
def test_sums_from_zero_and_onto_an_output_with_values(stage):
    assert_same_as_plainly(as_messages(stage, 2, 4, from_zero=True))
    assert_same_as_plainly(as_messages(stage, 2, 4, accumulates=True), True, OLD)


def test_a_message_is_cut_where_others_add():
    part = Box((1, 1), (3, 4))
    other = Box((2, 0), (5, 2))
    sums = (Contribution(4, (Box((5, 4), (6, 5)), part)), Contribution(7, (other,)))
    stage = MessageStage(sums=sums)
    assert combines(stage) == (
        Combine(Box((5, 4), (6, 5)), (Source(Box((0, 0), (1, 1)), 0, 0),)),
        Combine(
            Box((2, 1), (3, 2)),
            (Source(Box((1, 0), (2, 1)), 0, 1), Source(Box((0, 1), (1, 2)), 1, 0)),
        ),
        Combine(Box((1, 1), (2, 4)), (Source(Box((0, 0), (1, 3)), 0, 1),)),
        Combine(Box((2, 2), (3, 4)), (Source(Box((1, 1), (2, 3)), 0, 1),)),
        Combine(Box((3, 0), (5, 2)), (Source(Box((1, 0), (3, 2)), 1, 0),)),
        Combine(Box((2, 0), (3, 1)), (Source(Box((0, 0), (1, 1)), 1, 0),)),
    )


def halo_adjoint(grid: int, extent: int, index: tuple[int, ...]) -> MessageStage:
    inputs = Decomposition((Blocks(extent, grid),) * 3)
    plan = plan_halo(inputs, Halo((HaloWidths(1, 1),) * 3), index)
    (stage,) = plan.T.stages
    return as_messages(stage, plan.rank, 4)


def test_the_adjoint_of_a_halo_in_3d_is_27_boxes():
    made = combines(halo_adjoint(3, 15, (1, 1, 1)))
    assert len(made) == 27
    sources = sorted(len(combine.sources) for combine in made)
    # The inner cells, and those of faces, edges and corners, which go to 1, 3 and 7 neighbours.
    assert sources == [1] + [2] * 6 + [4] * 12 + [8] * 8
    corner = next(combine for combine in made if combine.destination.stop == (1, 1, 1))
    own, *received = corner.sources
    assert own == Source(Box((1, 1, 1), (2, 2, 2)))
    # In ascending rank order: ranks 0, 1, 3, 4, 9, 10 and 12 of 27 are 0, 1, 3, ... of 26 peers.
    assert [source.message for source in received] == [0, 1, 3, 4, 9, 10, 12]


def test_a_worker_in_the_corner_of_the_grid_gets_8_boxes():
    assert len(combines(halo_adjoint(2, 10, (0, 0, 0)))) == 8


def test_scalars():
    cell = Box((), ())
    stage = MessageStage(moves=(Move(cell, cell),), sums=(Contribution(1, (cell,)),))
    assert combines(stage) == (Combine(cell, (Source(cell), Source(cell, 0))),)


def test_sums_that_are_sent_on_are_refused_and_can_be_declined():
    size = 1 << 18
    plan = plan_all_sum_reduce(0, (0, 1), (size,), ())
    (stage,) = plan.stages
    assert as_messages(stage, 0, 4).relays
    with pytest.raises(ValueError, match="relayed"):
        combines(as_messages(stage, 0, 4))
    whole = Box.whole((size,))
    plain = as_messages(stage, 0, 4, scatters=False)
    assert combines(plain) == (Combine(whole, (Source(whole), Source(whole, 0))),)
    assert plain == as_messages(stage, 0, item_bytes=0)  # too small to scatter
