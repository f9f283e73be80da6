"""Random calls of the public functions, and their effect on all ranks' tensors at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

import gpudist
from gpudist.world.partition import CartesianPartition, Partition
from tests.ops.dense import Dense, Tensors, assembled, blocks, gathered_sources, partition_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64)
# Few, so that what a world remembers of each fills up in a run.
SHAPES = ((1, 1), (2, 1), (2, 2), (4, 1))
ROWS, COLUMNS = (4, 9), (4, 40)


@dataclass(frozen=True)
class Call:
    """A function, what every rank calls it with, and what must come out on every rank.

    Attributes:
        inputs: by world rank.
        apply: the function, on this rank.
        dense: from all inputs to all outputs; zero-volume outputs matter by their shape only.
    """

    name: str
    inputs: Tensors
    apply: Callable[[torch.Tensor], torch.Tensor]
    dense: Dense


@dataclass(frozen=True)
class Grid:
    """A partition in numbers: world ranks, and the shape of their grid."""

    ranks: tuple[int, ...]
    shape: tuple[int, int]

    def on(self, P_world: Partition) -> CartesianPartition:
        return partition_of(P_world, self.ranks, self.shape)


def grids(size: int) -> list[Grid]:
    """Return the grids that fit a world, on the same workers every time."""
    rng = random.Random(size)
    return [Grid(tuple(rng.sample(range(size), prod(s))), s) for s in SHAPES if prod(s) <= size]


def check(P_world: Partition, rng: random.Random, call: Call) -> None:
    """Carry out a call, and its adjoint where there are gradients.

    Raises:
        AssertionError: a tensor is not, in every bit, what it must be.
    """
    rank = P_world.rank
    assert rank is not None
    differentiable = call.inputs[0].dtype != torch.int64 and rng.random() < 0.6
    xs = [x.clone().requires_grad_(differentiable) for x in call.inputs]
    ys = call.dense(xs)
    x = call.inputs[rank].clone().requires_grad_(differentiable)
    y = call.apply(x)
    assert_equal(call.name, y, ys[rank])
    if differentiable:
        weights = [_whole(rng, y.shape, y.dtype) for y in ys]
        expected = torch.autograd.grad(ys, xs, weights, allow_unused=True, materialize_grads=True)
        weight = weights[rank] if y.numel() else torch.zeros_like(y)
        (gradient,) = torch.autograd.grad(y, x, weight, materialize_grads=True)
        assert_equal(f"adjoint of {call.name}", gradient, expected[rank])


def assert_equal(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    if not expected.numel():
        assert not actual.numel(), f"{name}: {list(actual.shape)} where there should be no cells"
        return
    assert actual.dtype == expected.dtype and torch.equal(actual, expected), (
        f"{name}: {actual} != {expected}"
    )


def _whole(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    return torch.randint(-3, 4, tuple(shape), generator=generator).to(dtype)


def _tensor(rng: random.Random, wide: int = 1) -> torch.Tensor:
    shape = rng.randint(*ROWS), wide * rng.randint(*COLUMNS)
    return _whole(rng, shape, rng.choice(DTYPES))


def _inputs(P: Partition, of_ranks: dict[int, torch.Tensor], like: torch.Tensor) -> Tensors:
    batch = next(iter(of_ranks.values())).shape[0]
    placeholder = like.new_empty((batch, 0))
    return [of_ranks.get(rank, placeholder) for rank in range(P.world.size)]


def _known(rng: random.Random, shape: Sequence[int]) -> dict[str, Any]:
    return {"global_shape": tuple(shape)} if rng.random() < 0.5 else {"shape": "dynamic"}


def _outputs(xs: Tensors, of_ranks: dict[int, torch.Tensor], members: Sequence[int]) -> Tensors:
    found: Tensors = []
    for rank, x in enumerate(xs):
        nothing = x.flatten()[:0] if rank in members else x.clone()
        found.append(of_ranks.get(rank, nothing))
    return found


def _different(rng: random.Random, P_world: Partition) -> tuple[Grid, Grid]:
    """Return one grid, and one it can be broadcast to."""
    every = grids(P_world.size)
    pairs = [
        (source, target)
        for number, target in enumerate(every)
        for source in every[:number]
        if all(a in (1, b) for a, b in zip(source.shape, target.shape, strict=True))
    ]
    return rng.choice(pairs[:4])


def _matched(rng: random.Random, P_world: Partition) -> tuple[Grid, Grid, dict[int, int]]:
    source, target = _different(rng, P_world)
    return source, target, gathered_sources(source.ranks, source.shape, target.ranks, target.shape)


def broadcast(rng: random.Random, P_world: Partition) -> Call:
    source, target, source_of = _matched(rng, P_world)
    whole = _tensor(rng)
    inputs = _inputs(
        P_world, dict(zip(source.ranks, blocks(whole, source.shape), strict=True)), whole
    )
    P_x, P_y, known = source.on(P_world), target.on(P_world), _known(rng, whole.shape)
    return Call(
        f"broadcast {source} -> {target}, {known}",
        inputs,
        lambda x: gpudist.broadcast(x, P_x, P_y, **known),
        lambda xs: _outputs(xs, {r: xs[s].clone() for r, s in source_of.items()}, source.ranks),
    )


def sum_reduce(rng: random.Random, P_world: Partition) -> Call:
    target, source, target_of = _matched(rng, P_world)
    whole = _tensor(rng)
    parts = dict(zip(target.ranks, blocks(whole, target.shape), strict=True))
    terms = {r: _whole(rng, parts[t].shape, whole.dtype) for r, t in target_of.items()}
    P_x, P_y, known = source.on(P_world), target.on(P_world), _known(rng, whole.shape)

    def dense(xs: Tensors) -> Tensors:
        sums = {
            to: torch.stack([xs[r] for r, t in target_of.items() if t == to]).sum(0)
            for to in target.ranks
        }
        return _outputs(xs, sums, source.ranks)

    return Call(
        f"sum_reduce {source} -> {target}, {known}",
        _inputs(P_world, terms, whole),
        lambda x: gpudist.sum_reduce(x, P_x, P_y, **known),
        dense,
    )


def all_sum_reduce(rng: random.Random, P_world: Partition) -> Call:
    grid, axes = rng.choice(grids(P_world.size)), rng.choice([(0,), (1,), (0, 1)])
    whole = _tensor(rng)
    kept = tuple(1 if d in axes else n for d, n in enumerate(grid.shape))
    group_of = gathered_sources(range(prod(kept)), kept, grid.ranks, grid.shape)
    parts = blocks(whole, kept)
    terms = {r: _whole(rng, parts[g].shape, whole.dtype) for r, g in group_of.items()}
    P_x, known = grid.on(P_world), _known(rng, whole.shape)

    def dense(xs: Tensors) -> Tensors:
        def total(group: int) -> torch.Tensor:
            return torch.stack([xs[r] for r, g in group_of.items() if g == group]).sum(0)

        return _outputs(xs, {r: total(g) for r, g in group_of.items()}, ())

    return Call(
        f"all_sum_reduce over {axes} of {grid}, {known}",
        _inputs(P_world, terms, whole),
        lambda x: gpudist.all_sum_reduce(x, P_x, axes, **known),
        dense,
    )


def _of_blocks(
    rng: random.Random, P_world: Partition, grid: Grid
) -> tuple[torch.Tensor, Tensors, Callable[[Tensors], torch.Tensor]]:
    whole = _tensor(rng)
    inputs = _inputs(P_world, dict(zip(grid.ranks, blocks(whole, grid.shape), strict=True)), whole)
    return whole, inputs, lambda xs: assembled([xs[r] for r in grid.ranks], grid.shape)


def repartition(rng: random.Random, P_world: Partition) -> Call:
    source, target = _different(rng, P_world)
    whole, inputs, together = _of_blocks(rng, P_world, source)
    P_x, P_y, known = source.on(P_world), target.on(P_world), _known(rng, whole.shape)
    return Call(
        f"repartition {source} -> {target}, {known}",
        inputs,
        lambda x: gpudist.repartition(x, P_x, P_y, **known),
        lambda xs: _outputs(
            xs,
            dict(zip(target.ranks, blocks(together(xs), target.shape), strict=True)),
            source.ranks,
        ),
    )


def send(rng: random.Random, P_world: Partition) -> Call:
    source = rng.choice(grids(P_world.size))
    ranks = random.Random(str(source)).sample(range(P_world.size), len(source.ranks))
    target = Grid(tuple(ranks), source.shape)
    whole, inputs, _ = _of_blocks(rng, P_world, source)
    P_x, P_y, known = source.on(P_world), target.on(P_world), _known(rng, whole.shape)
    return Call(
        f"send_recv {source} -> {target}, {known}",
        inputs,
        lambda x: gpudist.send_recv(x, P_x, P_y, **known),
        lambda xs: _outputs(
            xs,
            {r: xs[s].clone() for s, r in zip(source.ranks, target.ranks, strict=True)},
            source.ranks,
        ),
    )


def halo(rng: random.Random, P_world: Partition) -> Call:
    grid = rng.choice(grids(P_world.size))
    whole, inputs, together = _of_blocks(rng, P_world, grid)
    widths = tuple((rng.randint(0, 4), rng.randint(0, 4)) for _ in grid.shape)
    periodic, nested = rng.random() < 0.5, rng.random() < 0.5
    P_x, known = grid.on(P_world), _known(rng, whole.shape)

    def dense(xs: Tensors) -> Tensors:
        x, cuts = together(xs), []
        for dim, (left, right) in enumerate(widths):
            cells = torch.arange(x.shape[dim])
            if periodic:
                n = len(cells)
                around = torch.arange(-left, n + right) % n
                x = x.index_select(dim, around)
            else:
                edges = [list(x.shape), list(x.shape)]
                edges[0][dim], edges[1][dim] = left, right
                x = torch.cat([x.new_zeros(edges[0]), x, x.new_zeros(edges[1])], dim)
            cuts.append([(p[0].item(), p[-1].item() + 1 + left + right)
                         for p in cells.tensor_split(grid.shape[dim])])  # fmt: skip
        parts = [
            x[slice(*rows), slice(*columns)].clone() for rows in cuts[0] for columns in cuts[1]
        ]
        return _outputs(xs, dict(zip(grid.ranks, parts, strict=True)), ())

    return Call(
        f"halo_exchange {widths} of {grid}, periodic {periodic}, nested {nested}, {known}",
        inputs,
        lambda x: gpudist.halo_exchange(
            x, P_x, halo=widths, periodic=periodic, nested=nested, **known
        ),
        dense,
    )


def _lines(grid: Grid, axis: int) -> list[list[int]]:
    ranks = torch.tensor(grid.ranks).reshape(grid.shape)
    return (ranks if axis == 1 else ranks.T).tolist()


def all_gather(rng: random.Random, P_world: Partition) -> Call:
    grid, axis = rng.choice(grids(P_world.size)), rng.randrange(2)
    whole, inputs, _ = _of_blocks(rng, P_world, grid)
    P_x, known = grid.on(P_world), _known(rng, whole.shape)

    def dense(xs: Tensors) -> Tensors:
        found: dict[int, torch.Tensor] = {}
        for line in _lines(grid, axis):
            found |= {rank: torch.cat([xs[r] for r in line], axis) for rank in line}
        return _outputs(xs, found, ())

    return Call(
        f"all_gather along {axis} of {grid}, {known}",
        inputs,
        lambda x: gpudist.all_gather(x, P_x, [axis], **known),
        dense,
    )


def sum_scatter(rng: random.Random, P_world: Partition) -> Call:
    grid, axis = rng.choice(grids(P_world.size)), rng.randrange(2)
    whole = _tensor(rng)
    other = tuple(1 if d == axis else n for d, n in enumerate(grid.shape))
    parts = blocks(whole, other)
    terms = {
        rank: _whole(rng, parts[number].shape, whole.dtype)
        for number, line in enumerate(_lines(grid, axis))
        for rank in line
    }
    P_x = grid.on(P_world)

    def dense(xs: Tensors) -> Tensors:
        found: dict[int, torch.Tensor] = {}
        for line in _lines(grid, axis):
            total = torch.stack([xs[r] for r in line]).sum(0)
            found |= dict(zip(line, total.tensor_split(len(line), axis), strict=True))
        return _outputs(xs, found, ())

    return Call(
        f"sum_scatter along {axis} of {grid}",
        _inputs(P_world, terms, whole),
        lambda x: gpudist.sum_scatter(x, P_x, [axis], shape="dynamic"),
        dense,
    )


def scatter(rng: random.Random, P_world: Partition) -> Call:
    grid, whole = rng.choice(grids(P_world.size)), _tensor(rng)
    root = rng.randrange(len(grid.ranks))
    giver = grid.ranks[root]
    P_x = grid.on(P_world)

    def dense(xs: Tensors) -> Tensors:
        parts = blocks(xs[giver], grid.shape)
        return _outputs(xs, dict(zip(grid.ranks, parts, strict=True)), range(P_world.size))

    return Call(
        f"scatter from {root} of {grid}",
        _inputs(P_world, {giver: whole}, whole),
        lambda x: gpudist.scatter(x, P_x, root),
        dense,
    )


def gather(rng: random.Random, P_world: Partition) -> Call:
    grid = rng.choice(grids(P_world.size))
    _, inputs, together = _of_blocks(rng, P_world, grid)
    root = rng.randrange(len(grid.ranks))
    P_x = grid.on(P_world)
    return Call(
        f"gather to {root} of {grid}",
        inputs,
        lambda x: gpudist.gather(x, P_x, root),
        lambda xs: _outputs(xs, {grid.ranks[root]: together(xs)}, range(P_world.size)),
    )
