"""Random plans of every kind: the messages and boxes of every rank, and those of the adjoint."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from gpudist.errors import GpudistError
from gpudist.geometry import (
    AdaptiveWindow,
    Blocks,
    Box,
    Decomposition,
    HaloWidths,
    InterpolationWindow,
    Pairing,
    Plan,
    PoolWindow,
    SlidingWindow,
    TransposedWindow,
    Window,
    plan_all_gather,
    plan_all_sum_reduce,
    plan_broadcast,
    plan_faces,
    plan_halo,
    plan_repartition,
)
from gpudist.geometry.cartesian import index_of, rank_of
from gpudist.geometry.ring import plan_ring_hop


def record(count: int, folder: Path, is_first: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kinds = list(KINDS)
    for number in range(count):
        rng, kind = random.Random(f"frozen {number}"), kinds[number % len(kinds)]
        try:
            facts = [_of_plan(plan) for plan in KINDS[kind](rng)]
        except GpudistError as error:
            found[f"{number} {kind}"] = type(error).__name__
            continue
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        messages = sum(len(stage["sends"]) for forward, _ in facts for stage in forward)
        found[f"{number} {kind}"] = [len(facts), messages, digest]
    return found


def _of_plan(plan: Plan) -> tuple[Any, Any]:
    return [_of_stage(stage) for stage in plan.stages], [_of_stage(s) for s in plan.T.stages]


def _of_stage(stage: Any) -> dict[str, Any]:
    # Plain tuples: classes may be renamed.
    def messages(of: Any) -> list[Any]:
        return [(each.peer, [_cells(box) for box in each.boxes]) for each in of]

    return {
        "shapes": (stage.input_shape, stage.output_shape),
        "moves": [(_cells(move.source), _cells(move.destination)) for move in stage.moves],
        "sends": messages(stage.sends),
        "receives": messages(stage.receives),
        "collectives": [(c.kind, c.members, c.root, c.includes_root) for c in stage.collectives],
        "overlaps": (stage.sources_overlap, stage.destinations_overlap),
    }


def _cells(box: Box) -> tuple[Any, Any]:
    return box.start, box.stop


def _blocks(rng: random.Random, extent: int, parts: int) -> Blocks:
    if rng.random() < 0.5:
        return Blocks(extent, parts)
    stops = [*sorted(rng.randint(0, extent) for _ in range(parts - 1)), extent]
    starts = [0, *stops[:-1]]
    return Blocks.of_sizes([stop - start for start, stop in zip(starts, stops, strict=True)])


def _shape(rng: random.Random) -> tuple[int, ...]:
    dims = rng.randint(1, 3)
    return tuple(rng.randint(0, (30, 14, 8)[dims - 1]) for _ in range(dims))


def _cut(rng: random.Random, shape: tuple[int, ...]) -> Decomposition:
    most = (8, 4, 3)[len(shape) - 1]
    return Decomposition(tuple(_blocks(rng, n, rng.randint(1, most)) for n in shape))


def _indices(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return product(*map(range, grid))


def _window(rng: random.Random, extent: int) -> Window:
    kind = rng.randrange(6)
    numbers = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 2)
    if kind == 0:
        return SlidingWindow(*numbers, (rng.randint(0, 3), rng.randint(0, 3)))
    if kind == 1:
        return TransposedWindow(*numbers, rng.randint(0, 1), rng.randint(0, 1))
    if kind == 2:
        return PoolWindow(*numbers, (1, 1), ceil_mode=rng.random() < 0.5)
    if kind == 3:
        return AdaptiveWindow(rng.randint(1, 6))
    if kind == 4:
        return InterpolationWindow("linear", rng.randint(1, 2 * extent + 1))
    return HaloWidths(rng.randint(-1, 5), rng.randint(-1, 5))


def _halo(rng: random.Random, nested: bool) -> Iterator[Plan]:
    inputs = _cut(rng, _shape(rng))
    windows = [_window(rng, blocks.extent) for blocks in inputs.dims]
    periodic = [rng.random() < 0.3 for _ in inputs.dims]
    for index in _indices(inputs.grid):
        yield plan_halo(inputs, windows, index, periodic, nested)


def _faces(rng: random.Random) -> Iterator[Plan]:
    inputs = _cut(rng, tuple(n + 6 for n in _shape(rng)))
    windows = [
        SlidingWindow(2 * k + 1, padding=(k, k)) for k in (rng.randint(0, 2) for _ in inputs.dims)
    ]
    for index in _indices(inputs.grid):
        yield from (face.plan for face in plan_faces(inputs, windows, index))


def _repartition(rng: random.Random) -> Iterator[Plan]:
    shape = _shape(rng)
    source, target = _cut(rng, shape), _cut(rng, shape)
    size = max(prod(source.grid), prod(target.grid)) + rng.randint(0, 2)
    source_ranks, target_ranks = rng.sample(range(size), size), rng.sample(range(size), size)
    by_source = {source_ranks[i]: index for i, index in enumerate(_indices(source.grid))}
    by_target = {target_ranks[i]: index for i, index in enumerate(_indices(target.grid))}
    for rank in range(size):
        yield plan_repartition(
            source, target, rank, by_source.get(rank), by_target.get(rank),
            lambda index: source_ranks[rank_of(index, source.grid)],
            lambda index: target_ranks[rank_of(index, target.grid)],
        )  # fmt: skip


def _all_gather(rng: random.Random) -> Iterator[Plan]:
    inputs = _cut(rng, _shape(rng))
    axes = [axis for axis in range(len(inputs.grid)) if rng.random() < 0.6]
    for index in _indices(inputs.grid):
        yield plan_all_gather(inputs, axes, index)


def _broadcast(rng: random.Random) -> Iterator[Plan]:
    target = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3)))
    source = tuple(rng.choice((1, n)) for n in target)
    transposed = rng.random() < 0.3
    pairing = Pairing(source[::-1] if transposed else source, target, transposed)
    sources, targets = prod(source), prod(target)
    size = max(sources, targets) + rng.randint(0, 2)
    source_ranks, target_ranks = rng.sample(range(size), sources), rng.sample(range(size), targets)
    shapes = [tuple(rng.randint(0, 3) for _ in range(2)) for _ in range(sources)]
    for rank in range(size):
        at_source = source_ranks.index(rank) if rank in source_ranks else None
        at_target = target_ranks.index(rank) if rank in target_ranks else None
        root = None if at_target is None else pairing.source_of(at_target)
        yield plan_broadcast(
            rank,
            None if at_source is None else [target_ranks[t] for t in pairing.targets_of(at_source)],
            None if root is None else source_ranks[root],
            () if root is None else [target_ranks[t] for t in pairing.targets_of(root)],
            None if at_source is None else shapes[at_source],
            None if root is None else shapes[root],
            (),
        )


def _all_sum_reduce(rng: random.Random) -> Iterator[Plan]:
    grid = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3)))
    axes = [axis for axis in range(len(grid)) if rng.random() < 0.6]
    for rank in range(prod(grid)):
        index = index_of(rank, grid)
        free = [range(n) if axis in axes else (index[axis],) for axis, n in enumerate(grid)]
        yield plan_all_sum_reduce(rank, [rank_of(i, grid) for i in product(*free)], (2, 3), ())


def _ring(rng: random.Random) -> Iterator[Plan]:
    blocks, dim = _blocks(rng, rng.randint(0, 20), rng.randint(2, 6)), rng.randint(0, 1)
    for rank, step in product(range(blocks.parts), range(blocks.parts - 1)):
        yield plan_ring_hop(blocks, dim, (3, 4), rank, step, ())


KINDS: dict[str, Callable[[random.Random], Iterator[Plan]]] = {
    "halo": partial(_halo, nested=False),
    "nested halo": partial(_halo, nested=True),
    "faces": _faces,
    "repartition": _repartition,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_sum_reduce": _all_sum_reduce,
    "ring hop": _ring,
}
