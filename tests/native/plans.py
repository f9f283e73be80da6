"""Random plans of every operator, for all ranks at once, and their results by plain loops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from gpudist.errors import ShapeError
from gpudist.geometry import (
    Blocks,
    Box,
    Decomposition,
    Halo,
    HaloWidths,
    Pairing,
    Plan,
    SlidingWindow,
    Stage,
    TransposedWindow,
    Window,
    plan_all_gather,
    plan_all_sum_reduce,
    plan_broadcast,
    plan_halo,
    plan_repartition,
)
from gpudist.geometry.cartesian import index_of, rank_of

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

PerRank = list[torch.Tensor | None]  # by rank, None where a rank has no block


@dataclass(frozen=True)
class Operation:
    """A linear operator on some ranks of the world: their plans, and what they carry.

    Attributes:
        name: which operator.
        ranks: world rank of each rank of the plans.
        plans: by rank.
        dtype: of the data.
        fill: of output cells nothing moves to.
        whole: the data are small integers, whose sums are exact in any dtype.
        seed: of every rank's values and strides.
    """

    name: str
    ranks: tuple[int, ...]
    plans: tuple[Plan, ...]
    dtype: torch.dtype
    fill: float
    whole: bool
    seed: int

    def inputs(self) -> PerRank:
        """Every rank's input, of random strides."""
        return [
            None
            if plan.input_shape is None
            else _tensor(random.Random(f"{self.seed}/{rank}"), plan.input_shape, self)
            for rank, plan in enumerate(self.plans)
        ]

    def outputs(self, inputs: PerRank) -> PerRank:
        """Return the results of the plans, with every sum in the order in which gpudist adds."""
        blocks = inputs
        for stages in zip(*(plan.stages for plan in self.plans), strict=True):
            blocks = [
                _output(stages, rank, blocks, self.dtype, self.fill)
                for rank in range(len(self.plans))
            ]
        return blocks


def draw(rng: random.Random, world: int) -> Operation:
    """Return a random operator on some of the ranks of a world."""
    while True:
        size = rng.randint(1, world)
        make = rng.choice([_halo, _halo, _repartition, _all_gather, _broadcast, _all_sum_reduce])
        try:
            name, plans = make(rng, size)
        except ShapeError:
            continue  # a kernel that does not fit
        if rng.random() < 0.5:
            name, plans = f"adjoint of {name}", [plan.T for plan in plans]
        cells = max(prod(s.output_shape or ()) for plan in plans for s in plan.stages)
        if cells > 200_000:
            continue
        adds = any(_adds(stage) for plan in plans for stage in plan.stages)
        dtype = rng.choice(DTYPES[adds:])
        fill = 0.0
        if not adds and not name.startswith("adjoint"):
            fill = 1.0 if dtype == torch.bool else rng.choice([0.0, 0.0, 3.0])
        ranks = rng.sample(range(world), len(plans))
        whole = not (dtype.is_floating_point or dtype.is_complex) or rng.random() < 0.3
        return Operation(name, tuple(ranks), tuple(plans), dtype, fill, whole, rng.getrandbits(32))


def _adds(stage: Stage) -> bool:
    return stage.destinations_overlap or any(c.kind != "broadcast" for c in stage.collectives)


def _grid(rng: random.Random, size: int, dims: int) -> tuple[int, ...]:
    """Return a process grid of at most ``size`` workers."""
    grid = [1] * dims
    for _ in range(4):
        d = rng.randrange(dims)
        factor = rng.choice([2, 2, 3, 4, 5, 7, 8])
        if prod(grid) * factor <= size:
            grid[d] *= factor
    return tuple(grid)


def _extent(rng: random.Random, dims: int) -> int:
    if dims == 1 and rng.random() < 0.1:
        return rng.randint(10_000, 60_000)  # more than a slot, or the whole mailbox, holds
    return rng.randint(0, {1: 40, 2: 12}.get(dims, 6))


def _decomposition(rng: random.Random, shape: Sequence[int], grid: Sequence[int]) -> Decomposition:
    cuts: list[Blocks] = []
    for extent, parts in zip(shape, grid, strict=True):
        stops = sorted(rng.randint(0, extent) for _ in range(parts - 1))
        sizes = [b - a for a, b in zip([0, *stops], [*stops, extent], strict=True)]
        cuts.append(Blocks(extent, parts) if rng.random() < 0.5 else Blocks.of_sizes(sizes))
    return Decomposition(tuple(cuts))


def _window(rng: random.Random) -> Window:
    kind = rng.randrange(4)
    if kind == 0:
        padding = rng.randint(0, 3), rng.randint(0, 3)
        return SlidingWindow(rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 2), padding)
    if kind == 1:
        return TransposedWindow(rng.randint(1, 4), rng.randint(1, 3), 1, rng.randint(0, 1))
    return HaloWidths(rng.randint(-1, 4), rng.randint(-1, 4))


def _halo(rng: random.Random, size: int) -> tuple[str, list[Plan]]:
    dims = rng.randint(1, 3)
    grid = _grid(rng, size, dims)
    inputs = _decomposition(rng, [_extent(rng, dims) for _ in grid], grid)
    windows = tuple(_window(rng) for _ in grid)
    periodic = tuple(rng.random() < 0.4 for _ in grid)
    nested = rng.random() < 0.4
    halo = Halo(windows, periodic, nested)
    plans = [plan_halo(inputs, halo, index_of(rank, grid)) for rank in range(prod(grid))]
    return "nested halo" if nested else "halo", plans


def _repartition(rng: random.Random, size: int) -> tuple[str, list[Plan]]:
    dims = rng.randint(1, 3)
    shape = [_extent(rng, dims) for _ in range(dims)]
    grids = _grid(rng, size, dims), _grid(rng, size, dims)
    source, target = (_decomposition(rng, shape, grid) for grid in grids)
    workers = [rng.sample(range(size), prod(grid)) for grid in grids]

    def index(side: int, rank: int) -> tuple[int, ...] | None:
        if rank not in workers[side]:
            return None
        return index_of(workers[side].index(rank), grids[side])

    return "repartition", [
        plan_repartition(
            source,
            target,
            rank,
            index(0, rank),
            index(1, rank),
            lambda i: workers[0][rank_of(i, grids[0])],
            lambda i: workers[1][rank_of(i, grids[1])],
        )
        for rank in range(size)
    ]


def _all_gather(rng: random.Random, size: int) -> tuple[str, list[Plan]]:
    dims = rng.randint(1, 3)
    grid = _grid(rng, size, dims)
    inputs = _decomposition(rng, [_extent(rng, dims) for _ in grid], grid)
    axes = [d for d in range(dims) if rng.random() < 0.6]
    return "all-gather", [
        plan_all_gather(inputs, axes, index_of(rank, grid)) for rank in range(prod(grid))
    ]


def _broadcast(rng: random.Random, size: int) -> tuple[str, list[Plan]]:
    target = _grid(rng, size, rng.randint(1, 3))
    source = tuple(n if rng.random() < 0.5 else 1 for n in target)
    pairing = Pairing(source, target)
    roots, members = rng.sample(range(size), prod(source)), rng.sample(range(size), prod(target))
    shapes = [tuple(_extent(rng, 2) for _ in range(rng.randint(0, 3))) for _ in roots]

    def plan(rank: int) -> Plan:
        root = roots.index(rank) if rank in roots else None
        origin = pairing.source_of(members.index(rank)) if rank in members else None
        return plan_broadcast(
            rank,
            [members[i] for i in pairing.targets_of(root)] if root is not None else None,
            roots[origin] if origin is not None else None,
            [members[i] for i in pairing.targets_of(origin)] if origin is not None else (),
            shapes[root] if root is not None else None,
            shapes[origin] if origin is not None else None,
            ("broadcast", source, target, tuple(roots), tuple(members), tuple(shapes)),
        )

    return "broadcast", [plan(rank) for rank in range(size)]


def _all_sum_reduce(rng: random.Random, size: int) -> tuple[str, list[Plan]]:
    colors = [rng.randrange(3) for _ in range(size)]
    shapes = [tuple(_extent(rng, 2) for _ in range(rng.randint(0, 3))) for _ in range(3)]
    key = ("all_sum_reduce", tuple(colors), tuple(shapes))
    return "all-sum-reduce", [
        plan_all_sum_reduce(
            rank, [r for r in range(size) if colors[r] == color], shapes[color], key
        )
        for rank, color in enumerate(colors)
    ]


def _tensor(rng: random.Random, shape: Sequence[int], of: Operation) -> torch.Tensor:
    """Random values, where a random dim may be expanded, permuted, or every second of its cells."""
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    order = list(range(len(shape)))
    rng.shuffle(order)
    expanded = [n > 0 and rng.random() < 0.1 for n in shape]
    step = [rng.choice([1, 1, 1, 2]) for _ in shape]
    extents = [
        1 if once else n * by + rng.randint(0, 1)
        for n, once, by in zip(shape, expanded, step, strict=True)
    ]
    if rng.random() < 0.4:
        order, step, extents = list(range(len(shape))), [1] * len(shape), list(shape)
        expanded = [False] * len(shape)
    base = _values(generator, [extents[d] for d in order], of)
    x = base.permute([order.index(d) for d in range(len(shape))])
    for d, (n, once, by) in enumerate(zip(shape, expanded, step, strict=True)):
        if not once:
            x = x[(slice(None),) * d + (slice(0, n * by, by),)]
    return x.expand(tuple(shape))


def _values(generator: torch.Generator, shape: Sequence[int], of: Operation) -> torch.Tensor:
    if of.dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if of.whole:
        return torch.randint(0, 4, tuple(shape), generator=generator).to(of.dtype)
    parts = 2 if of.dtype.is_complex else 1
    x = torch.randn((parts, *shape), generator=generator, dtype=torch.float64)
    # The values have many magnitudes, so a sum depends on its order.
    x *= 10.0 ** torch.randint(-2, 3, x.shape, generator=generator)
    return (torch.complex(x[0], x[1]) if parts == 2 else x[0]).to(of.dtype)


def _output(
    stages: Sequence[Stage], rank: int, blocks: PerRank, dtype: torch.dtype, fill: float
) -> torch.Tensor | None:
    stage = stages[rank]
    if stage.output_shape is None:
        return None
    adds = _adds(stage)
    wide = WIDER.get(dtype, dtype) if adds else dtype
    output = torch.full(stage.output_shape, 0 if adds else fill).to(wide)
    arrivals: list[tuple[int, Box, Box]] = [
        (rank, move.source, move.destination) for move in stage.moves
    ]
    for message in stage.receives:
        (sent,) = (m.boxes for m in stages[message.peer].sends if m.peer == rank)
        arrivals += [(message.peer, a, b) for a, b in zip(sent, message.boxes, strict=True)]
    whole = Box.whole(stage.output_shape)
    for collective in stage.collectives:
        givers = [r for r in collective.members if r != collective.root or collective.includes_root]
        if collective.kind == "broadcast":
            givers = [collective.root] if rank in givers else []
        elif collective.kind == "reduce" and rank != collective.root:
            givers = []
        arrivals += [(giver, whole, whole) for giver in givers]
    arrivals.sort(key=lambda arrival: arrival[0])
    if adds and wide == dtype and not _same_cells(arrivals):
        # Most cells are a rank's own and nobody adds to them: its largest part is there first.
        own = [arrival for arrival in arrivals if arrival[0] == rank]
        base = max(own, key=lambda arrival: arrival[2].volume, default=None)
        arrivals.sort(key=lambda arrival: arrival is not base)
    for giver, source, destination in arrivals:
        block = blocks[giver]
        assert block is not None
        cells = block[source.slices].to(wide)
        if adds:
            output[destination.slices] += cells
        else:
            output[destination.slices] = cells
    return output.to(dtype)


def _same_cells(arrivals: list[tuple[int, Box, Box]]) -> bool:
    givers = [giver for giver, _, _ in arrivals]
    return len(set(givers)) == len(givers) and len({to for _, _, to in arrivals}) == 1
