"""Execute the plans of all ranks on NumPy arrays, with independent checks.

Arrays may have further dims after those of the boxes; they are carried along, which applies an
operator to many vectors at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

from gpudist.geometry import Box, Plan, Stage

Array = NDArray[np.int64]
PerRank = list[Any]  # an array, or None where a rank has no block

# Mutation testing asks for fewer.
EXAMPLES = int(os.environ.get("GEOMETRY_EXAMPLES", "120"))
exactly = settings(max_examples=EXAMPLES, deadline=None, derandomize=True)


def numbered(shape: Sequence[int]) -> Array:
    """Return an array whose cells hold their index from 1 on; 0 marks padding."""
    return np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape)


def cut(array: Array, ranges: Sequence[tuple[int, int]], periodic: Sequence[bool]) -> Array:
    """Return the cells of ``array`` at ``ranges``, zero or wrapped beyond its edges."""
    cells = [np.arange(*cells) for cells in ranges]
    inside: list[Any] = []
    for d, wraps in enumerate(periodic):
        extent = array.shape[d]
        inside.append((cells[d] >= 0) & (cells[d] < extent))
        if wraps and extent:
            inside[d][:] = True
            cells[d] %= extent
    result = np.zeros([len(c) for c in cells], dtype=int)
    result[np.ix_(*inside)] = array[np.ix_(*(c[i] for c, i in zip(cells, inside, strict=True)))]
    return result


def carry_out(plans: Sequence[Plan], blocks: PerRank) -> PerRank:
    """Outputs of all ranks: ``plans[rank]`` and ``blocks[rank]`` are those of ``rank``."""
    assert [plan.rank for plan in plans] == list(range(len(plans)))
    assert len({len(plan.stages) for plan in plans}) == 1
    for stages in zip(*(plan.stages for plan in plans), strict=True):
        blocks = _carry_out_stage(stages, blocks)
    return blocks


def matrix(plans: Sequence[Plan]) -> Array:
    """The dense matrix of the whole machine's operator; rows and columns run over all ranks."""
    volumes = [_volume(plan.input_shape) for plan in plans]
    stops = np.cumsum(volumes)
    units = np.eye(sum(volumes), dtype=int)
    inputs = [
        None
        if plan.input_shape is None
        else units[stop - volume : stop].reshape(*plan.input_shape, len(units))
        for plan, volume, stop in zip(plans, volumes, stops, strict=True)
    ]
    outputs = carry_out(plans, inputs)
    rows = [b.reshape(_volume(b.shape[:-1]), len(units)) for b in outputs if b is not None]
    return np.concatenate(rows) if rows else np.zeros((0, len(units)), dtype=int)


def assert_linear_operator(plans: Sequence[Plan]) -> None:
    """The plans name one operator, and ``T`` is its transpose."""
    adjoints = [plan.T for plan in plans]
    np.testing.assert_array_equal(matrix(adjoints), matrix(plans).T)
    assert all(plan.T.T is plan and plan.T is plan.T for plan in plans)
    assert all(
        (plan.T.input_shape, plan.T.output_shape) == (plan.output_shape, plan.input_shape)
        for plan in plans
    )
    assert len({plan.identity for plan in plans}) == 1
    assert len({plan.identity for plan in adjoints}) == 1
    assert plans[0].identity != adjoints[0].identity


def _carry_out_stage(stages: Sequence[Stage], blocks: PerRank) -> PerRank:
    carried: tuple[int, ...] = ()
    for stage, block in zip(stages, blocks, strict=True):
        assert (stage.input_shape is None) == (block is None)
        if stage.input_shape is not None:
            dim = len(stage.input_shape)
            assert block.shape[:dim] == stage.input_shape
            carried = block.shape[dim:]
    reads = _cleared([stage.input_shape for stage in stages])
    writes = _cleared([stage.output_shape for stage in stages])
    outputs = _cleared([stage.output_shape for stage in stages], carried)

    def copy(source: int, box: Box, target: int, destination: Box) -> None:
        assert box.shape == destination.shape
        assert min(box.shape, default=0) >= 0
        _assert_inside(box, stages[source].input_shape)
        _assert_inside(destination, stages[target].output_shape)
        reads[source][box.slices] += 1
        writes[target][destination.slices] += 1
        outputs[target][destination.slices] += blocks[source][box.slices]

    for rank, stage in enumerate(stages):
        for move in stage.moves:
            copy(rank, move.source, rank, move.destination)
    for sender, receiver, boxes, destinations in _messages(stages):
        for box, destination in zip(boxes, destinations, strict=True):
            copy(sender, box, receiver, destination)
    for kind, members, root, includes_root in _collectives(stages):
        others = [rank for rank in members if rank != root or includes_root]
        if kind == "broadcast":
            whole = Box.whole(reads[root].shape)
            for rank in others:
                copy(root, whole, rank, whole)
            continue
        total = np.sum([blocks[rank] for rank in others], axis=0)
        for rank in members if kind == "all_reduce" else (root,):
            assert outputs[rank].shape == total.shape
            outputs[rank] += total
            writes[rank] += 1

    for stage, read, written in zip(stages, reads, writes, strict=True):
        if read is not None and not stage.sources_overlap and not stage.collectives:
            assert (read <= 1).all(), "an input cell goes to several places unannounced"
        if written is not None and not stage.destinations_overlap:
            assert (written <= 1).all(), "an output cell is written twice unannounced"
        if stage.covers_output:
            assert (written == 1).all(), "an output cell is left unwritten unannounced"
    return outputs


def _messages(stages: Sequence[Stage]):
    """Every message: sender, receiver and its boxes at both ends, which must match."""
    sent = {(a, m.peer): m.boxes for a, stage in enumerate(stages) for m in stage.sends}
    received = {(m.peer, b): m.boxes for b, stage in enumerate(stages) for m in stage.receives}
    assert sent.keys() == received.keys(), "a message without an end"
    assert len(sent) == sum(len(stage.sends) for stage in stages), "two messages to one peer"
    assert len(received) == sum(len(stage.receives) for stage in stages)
    for stage in stages:
        for messages in (stage.sends, stage.receives):
            assert [m.peer for m in messages] == sorted(m.peer for m in messages)
            assert all(m.volume for m in messages), "an empty message"
    for sender, receiver in sent:
        assert sender != receiver, "a message to itself"
        boxes, destinations = sent[sender, receiver], received[sender, receiver]
        assert [box.shape for box in boxes] == [box.shape for box in destinations]
        yield sender, receiver, boxes, destinations


def _collectives(stages: Sequence[Stage]):
    """Every collective, called by its members and by nobody else, in one order everywhere."""
    called: dict[tuple[Any, ...], list[int]] = {}
    for rank, stage in enumerate(stages):
        roots = [c.root for c in stage.collectives]
        assert roots == sorted(set(roots)), "collectives without a common order"
        for c in stage.collectives:
            called.setdefault((c.kind, c.members, c.root, c.includes_root), []).append(rank)
    for key, ranks in called.items():
        _, members, root, _ = key
        assert tuple(ranks) == members, "a collective without one of its members"
        assert root in members
        yield key


def _assert_inside(box: Box, shape: Sequence[int] | None) -> None:
    assert shape is not None
    for start, stop, extent in zip(box.start, box.stop, shape, strict=True):
        assert 0 <= start <= stop <= extent


def _cleared(shapes: Sequence[tuple[int, ...] | None], carried: tuple[int, ...] = ()) -> PerRank:
    return [None if s is None else np.zeros((*s, *carried), dtype=int) for s in shapes]


def _volume(shape: Sequence[int] | None) -> int:
    return 0 if shape is None else int(np.prod(shape, dtype=int))
