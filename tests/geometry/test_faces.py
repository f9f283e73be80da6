from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.geometry import (
    Blocks,
    Box,
    Decomposition,
    Halo,
    HaloWidths,
    SlidingWindow,
    Window,
    faces,
    halo,
    own_paddings,
    plan_faces,
    plan_halo,
)
from gpudist.geometry.faces import Face, axis_paddings, from_strip, have_faces
from tests.geometry.oracle import assert_linear_operator, carry_out, cut, exactly, numbered
from tests.geometry.strategies import cuts, decompositions, sliding_windows


@st.composite
def cases(draw: st.DrawFn):
    """A decomposition, a sliding window or none per dim, and the dims that wrap."""
    inputs = draw(decompositions())
    chosen = tuple(draw(st.one_of(st.just(HaloWidths()), sliding_windows(n))) for n in inputs.shape)
    return inputs, chosen, tuple(draw(st.booleans()) for _ in chosen)


def workers_of(inputs: Decomposition) -> list[tuple[int, ...]]:
    return list(product(*map(range, inputs.grid)))


def output_block(inputs: Decomposition, chosen, index) -> Box:
    cut = [window.outputs(blocks) for blocks, window in zip(inputs.dims, chosen, strict=True)]
    return Decomposition(tuple(cut)).block(index)


def needed_by(inputs: Decomposition, chosen: tuple[Window, ...], outputs: Box):
    """Range of global cells that global outputs read, per dim; empty ones have no place."""
    return [
        window.needed(start, stop, n) if start < stop else (0, 0)
        for window, start, stop, n in zip(
            chosen, outputs.start, outputs.stop, inputs.shape, strict=True
        )
    ]


def global_outputs(face: Face, block: Box) -> Box:
    return face.outputs.relative_to([-start for start in block.start])


def reads_a_ghost(inputs: Decomposition, chosen, periodic, index, output) -> bool:
    owned = inputs.block(index)
    ranges = needed_by(inputs, chosen, Box(output, tuple(o + 1 for o in output)))
    for (low, high), n, wraps, start, stop in zip(
        ranges, inputs.shape, periodic, owned.start, owned.stop, strict=True
    ):
        cells = [c for c in range(low, high) if wraps or 0 <= c < n]
        if any(not start <= c < stop for c in cells):
            return True
    return False


@exactly
@given(cases())
def test_every_output_that_reads_a_ghost_is_in_one_face(case):
    inputs, chosen, periodic = case
    if 0 in inputs.shape:
        return
    for index in workers_of(inputs):
        block = output_block(inputs, chosen, index)
        count = np.zeros(block.shape, dtype=int)
        for face in plan_faces(inputs, Halo(chosen, periodic), index):
            assert all(0 <= a <= b <= n for a, b, n in zip(
                face.outputs.start, face.outputs.stop, block.shape, strict=True
            ))  # fmt: skip
            count[face.outputs.slices] += 1
        for local in np.ndindex(*block.shape):
            output = tuple(o + start for o, start in zip(local, block.start, strict=True))
            expected = reads_a_ghost(inputs, chosen, periodic, index, output)
            assert count[local] == expected, (index, output)


@exactly
@given(cases())
def test_slab_and_own_block_are_what_the_face_reads(case):
    inputs, chosen, periodic = case
    array = numbered(inputs.shape)
    workers = workers_of(inputs)
    blocks = [array[inputs.block(index).slices] for index in workers]
    options = Halo(chosen, periodic)
    per_rank = [plan_faces(inputs, options, index) for index in workers]
    assert len({len(own) for own in per_rank}) == 1
    assert have_faces(inputs, options) == bool(per_rank[0])
    for own in zip(*per_rank, strict=True):
        slabs = carry_out([face.plan for face in own], blocks)
        from_strips = [from_strip(face.plan.stages[0]) for face in own]
        plans = [
            replace(face.plan, stages=(stage,))
            for face, (stage, _) in zip(own, from_strips, strict=True)
        ]
        strips = [b[strip.slices] for b, (_, strip) in zip(blocks, from_strips, strict=True)]
        for slab, again in zip(slabs, carry_out(plans, strips), strict=True):
            np.testing.assert_array_equal(slab, again)
        for index, face, slab in zip(workers, own, slabs, strict=True):
            outputs = global_outputs(face, output_block(inputs, chosen, index))
            ranges = needed_by(inputs, chosen, outputs)
            if 0 in outputs.shape:
                assert slab.size == 0
                continue
            whole, owned = cut(array, ranges, periodic), inputs.block(index)
            inside = [
                slice(max(start - low, 0), max(min(stop, high) - low, 0))
                for (low, high), start, stop in zip(ranges, owned.start, owned.stop, strict=True)
            ]
            whole[tuple(inside)] = 0
            np.testing.assert_array_equal(slab, whole)


@exactly
@given(cases())
def test_the_transposed_plan_is_the_transposed_matrix(case):
    inputs, chosen, periodic = case
    options = Halo(chosen, periodic)
    per_rank = [plan_faces(inputs, options, index) for index in workers_of(inputs)]
    for own in zip(*per_rank, strict=True):
        assert_linear_operator([face.plan for face in own])
    identities = [face.plan.identity for face in per_rank[0]]
    assert len(set(identities)) == len(identities)


# Outputs (start, stop) of the left and of the right face of each worker, in its own output block.
GOLDEN = {
    "k3p1 n9 P3": (SlidingWindow(3, padding=(1, 1)), 9, [(0, 0, 2, 3), (0, 1, 2, 3), (0, 1, 3, 3)]),
    "k3s2p1 n16 P2": (SlidingWindow(3, 2, padding=(1, 1)), 16, [(0, 0, 4, 4), (0, 1, 4, 4)]),
    "k5p2 n5 P5": (SlidingWindow(5, padding=(2, 2)), 5, [(0, 0, 0, 1), *[(0, 1, 1, 1)] * 4]),
    "k2s2 n8 P2": (SlidingWindow(2, 2), 8, None),
    "k1 n7 P3": (SlidingWindow(1), 7, None),
}  # fmt: skip


@pytest.mark.parametrize(("window", "extent", "expected"), GOLDEN.values(), ids=GOLDEN.keys())
def test_faces_along_one_dim(window, extent, expected):
    inputs = Decomposition.balanced((extent,), (len(expected) if expected else extent // 3,))
    for (index,) in workers_of(inputs):
        found = plan_faces(inputs, Halo((window,)), (index,))
        if expected is None:
            assert found == ()
            continue
        ranges = [(face.outputs.start[0], face.outputs.stop[0]) for face in found]
        left, right = expected[index][:2], expected[index][2:]
        wanted = [left, right] if any(a < b for *_, a, b in expected) else [left]
        assert ranges == wanted


def test_slab_has_ghosts_only():
    inputs = Decomposition.balanced((4, 4), (2, 1))
    left, right = plan_faces(inputs, Halo((SlidingWindow(3, padding=(1, 1)),) * 2), (0, 0))
    assert left.outputs.volume == 0 and left.plan.output_shape == (0, 6)
    assert right.outputs == Box((1, 0), (2, 4)) and right.plan.output_shape == (3, 6)
    stage = right.plan.stages[0]
    assert [message.boxes for message in stage.receives] == [(Box((2, 1), (3, 5)),)]
    assert not stage.moves and not stage.sends
    assert [message.boxes for message in left.plan.stages[0].sends] == [(Box((1, 0), (2, 4)),)]


def test_no_corner_travels_twice():
    """For the central of 3 x 3 workers, each of the four corners is in one of four faces."""
    inputs = Decomposition.balanced((12, 12), (3, 3))
    found = plan_faces(inputs, Halo((SlidingWindow(3, padding=(1, 1)),) * 2), (1, 1))
    corners = {0, 2, 6, 8}
    peers = [{m.peer for m in face.plan.stages[0].receives} for face in found]
    assert [own & corners for own in peers] == [{0, 2}, {6, 8}, set(), set()]
    assert [own - corners for own in peers] == [{1, 3, 5}, {3, 5, 7}, {3}, {5}]


def test_a_periodic_axis_wraps_to_the_worker_itself():
    inputs = Decomposition.balanced((4,), (1,))
    options = Halo((SlidingWindow(3, padding=(1, 1)),), periodic=(True,))
    found = plan_faces(inputs, options, (0,))
    slabs = [carry_out([face.plan], [np.array([1, 2, 3, 4])])[0].tolist() for face in found]
    assert slabs == [[4, 0, 0], [0, 0, 1]]
    assert not any(face.plan.stages[0].communicates for face in found)


@pytest.mark.parametrize("periodic", [False, True])
def test_seventeen_workers(periodic: bool):
    inputs = Decomposition((Blocks(1, 1), Blocks.of_sizes([3, 0, 1, 5, 2, 0, 0, 4, *[2] * 9])))
    chosen = (HaloWidths(), SlidingWindow(5, padding=(2, 2)))
    array = numbered(inputs.shape)
    workers = workers_of(inputs)
    options = Halo(chosen, (False, periodic))
    per_rank = [plan_faces(inputs, options, index) for index in workers]
    blocks = [array[inputs.block(index).slices] for index in workers]
    received = 0
    for own in zip(*per_rank, strict=True):
        plans = [face.plan for face in own]
        assert_linear_operator(plans)
        for index, face, slab in zip(workers, own, carry_out(plans, blocks), strict=True):
            outputs = global_outputs(face, output_block(inputs, chosen, index))
            if outputs.volume == 0:
                continue
            ranges = needed_by(inputs, chosen, outputs)
            low, (start, stop) = ranges[1][0], inputs.dims[1].block(index[1])
            whole = cut(array, ranges, (False, periodic))
            cells = np.arange(whole.shape[1]) + low
            whole[:, (cells >= start) & (cells < stop)] = 0
            np.testing.assert_array_equal(slab, whole)
            received += np.count_nonzero(slab)
    assert received > 17 * 3


def test_planning_never_looks_at_workers_that_are_no_peers(monkeypatch: pytest.MonkeyPatch):
    ranks: list[int] = []

    def counted(index, shape, rank_of=halo.rank_of):
        ranks.append(rank_of(index, shape))
        return ranks[-1]

    monkeypatch.setattr(halo, "rank_of", counted)
    monkeypatch.setattr(faces, "rank_of", counted)
    inputs = Decomposition.balanced((1, 1, 512, 512, 512), (1, 1, 64, 64, 64))
    options = Halo((*[HaloWidths()] * 2, *[SlidingWindow(3, padding=(1, 1))] * 3))
    index = (0, 0, 32, 32, 32)
    planned = plan_faces(inputs, options, index)
    whole = plan_halo(inputs, options, index)
    peers = {message.peer for message in whole.stages[0].receives}
    assert set(ranks) == {*peers, whole.rank}
    assert {m.peer for face in planned for m in face.plan.stages[0].receives} == peers
    assert len(ranks) < 200


@exactly
@given(st.data())
def test_own_paddings_give_the_own_outputs(data):
    extent = data.draw(st.integers(1, 14))
    blocks, window = data.draw(cuts(extent)), data.draw(sliding_windows(extent))
    inputs = Decomposition((Blocks(2, 1), blocks))
    chosen = (HaloWidths(), window)
    per_rank = [own_paddings(inputs, chosen, index) for index in workers_of(inputs)]
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
            assert own_paddings(inputs, [HaloWidths(), window, window], index) == expected


def test_own_paddings_where_there_is_no_block():
    """The padding of a worker without outputs belongs to nobody, and the others have theirs."""
    assert axis_paddings(Blocks(2, 3), SlidingWindow(1)) == (0, 0, 0)
    assert axis_paddings(Blocks(2, 3), SlidingWindow(3, padding=(1, 1))) == (1, 1, 0)
