"""Searched layouts: the best of all, right between ranks, and small where messages are slow."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.networks import UNet3d
from gpudist import Plan
from gpudist.errors import ShapeError
from gpudist.planning import Link, Profile, fits, layout_search, profile_of, recompute, search
from gpudist.planning.advice import advice_on, dry_network, rank_grids
from gpudist.planning.explanation import all_stretches
from gpudist.planning.layout_choices import LayoutChoices
from gpudist.planning.layout_search import choices_of, starts_of
from gpudist.planning.rehearsal import DryNetwork
from gpudist.world.partition import Partition
from tests.convert.training import assert_as_alone
from tests.nn.compare import grid
from tests.planning.stretches import stretch
from tests.pool import distributed

SLOW = replace(profile_of("a100"), name="slow", ranks_per_node=1, network=Link(2000.0, 10.0, 10.0))
FAST = replace(profile_of("a100"), name="fast", kernel_us=0.0, node=Link(0.0, 0.0, 1e9))
MOST_PLANS = 2000
SHAPE, SPLIT = (2, 2, 256, 256), (1, 1, 2, 1)


class Drawn(nn.Module):
    """Few layers and functions in a random order, with skips."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.kinds = [draw.choice("cccpugrs") for _ in range(draw.randint(2, 4))]
        sizes = [draw.choice([1, 3]) for _ in self.kinds]
        self.layers = nn.ModuleList(
            nn.GroupNorm(1, 4) if kind == "g" else nn.Conv2d(4, 4, size, padding="same")
            for kind, size in zip(self.kinds, sizes, strict=True)
        )
        self.skips = [draw.randrange(3) for _ in self.kinds]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for kind, layer, skip in zip(self.kinds, self.layers, self.skips, strict=True):
            before = x
            if kind in "cg":
                x = layer(x)
            elif kind == "p":
                x = F.avg_pool2d(x, 2)
            elif kind == "u":
                x = F.interpolate(x, scale_factor=2.0)
            else:
                x = x.relu() if kind == "r" else x.sigmoid()
            same = [y for y in seen if y.shape == x.shape]
            if skip == 0 and same:
                x = x + same[0]
            elif skip == 1 and before.shape == x.shape:
                x = F.relu(x, inplace=True) * before
            seen.append(x)
        return x


@pytest.fixture
def _only_one_plan_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_search, "_REHEARSED", 1)


def few_choices(seed: int) -> LayoutChoices:
    """Return the choices of the first drawn network that has few enough plans."""
    for number in count(seed, 1000):
        dry = DryNetwork(Drawn(number), (2, 4, 16, 16), SLOW if seed % 2 else profile_of("h100"))
        found = choices_of(dry, (1, 1, 2, 2) if seed % 5 == 0 else (1, 1, 2, 1), 0)
        if prod(found.sizes) <= MOST_PLANS:
            return found
    raise AssertionError


@pytest.mark.one_in(10)
@pytest.mark.parametrize("seed", range(50))
def test_the_best_plan_is_the_best_of_all_plans(seed: int) -> None:
    found = few_choices(seed)
    every = (found.cost(choice) for choice in product(*map(range, found.sizes)))
    costs = sorted(cost[0] for cost in every if cost is not None)
    solved = found.solve(10)
    assert solved.is_exact
    assert [cost for cost, _ in solved.best] == pytest.approx(costs[:10])


class Skips(nn.Module):
    """Two levels, and a tensor that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, padding=1)
        self.low = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1),
        )  # fmt: skip
        self.up = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down(x)
        b = F.max_pool2d(a, 4)
        b = self.low(b) + b
        return self.up(torch.cat([a, F.interpolate(b, scale_factor=4.0) * a], 1))


@pytest.mark.parametrize(
    ("profile", "is_whole"), [(SLOW, True), (FAST, False)], ids=["slow", "fast"]
)
def test_slow_messages_make_tensors_whole(profile: Profile, is_whole: bool) -> None:
    found = search(Skips(), SHAPE, SPLIT, profile)
    assert bool(found.layouts) == is_whole
    assert found.notes[0].startswith(f"{profile.name}: ")
    assert Plan.from_text(found.to_text()) == found
    (every,) = found.stretches
    assert (every.first, every.last, every.whole) == ("down (conv2d)", "up (conv2d)", {2: is_whole})
    # A worker sends its half of the input, which has no gradient.
    assert every.entering_bytes == (prod(SHAPE) * 4 // 2 if is_whole else 0)
    if is_whole:
        dry = DryNetwork(Skips(), SHAPE, profile)
        assert advice_on(dry, SPLIT, plan=found).seconds < advice_on(dry, SPLIT).seconds
        assert "whole; saves" in found.notes[1]
        assert "next best: split as the input" in found.notes[1]


def test_a_plan_that_needs_too_much_memory_is_not_chosen() -> None:
    dry = DryNetwork(Skips(), SHAPE, SLOW)
    alone = advice_on(dry, SPLIT).memory_bytes
    wide = search(Skips(), SHAPE, SPLIT, SLOW)
    assert advice_on(dry, SPLIT, plan=wide).memory_bytes > 1.3 * alone
    limit = 1.1 * alone
    narrow = search(Skips(), SHAPE, SPLIT, SLOW, memory_gib=limit / 2**30)
    assert advice_on(dry, SPLIT, plan=narrow).memory_bytes <= limit
    with pytest.raises(ShapeError, match=r"search: on \[1, 1, 2, 1\] a step needs"):
        search(Skips(), SHAPE, SPLIT, SLOW, memory_gib=0.5 * alone / 2**30)


@pytest.fixture
def _collections_as_in_python() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_collections_as_in_python")
def test_the_setting_of_the_garbage_collector_is_as_before() -> None:
    network, during = nn.Conv2d(3, 3, 3, padding=1), list[int]()

    def note(*_: object) -> None:
        during.append(gc.get_threshold()[0])

    search(network, (1, 3, 8, 8), (1, 1, 2, 1), FAST, progress=note)
    assert during
    assert min(during) > 700
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(ShapeError):
        search(network, (1, 4, 8, 8), (1, 1, 2, 1), FAST)
    assert gc.get_threshold() == (700, 10, 10)


def test_the_device_must_have_a_profile() -> None:
    with pytest.raises(ShapeError, match=r"a CPU, .* gpudist bench profile"):
        search(Skips(), SHAPE, SPLIT)


def test_stretches_are_all_functions_of_the_forward() -> None:
    dry = DryNetwork(Skips(), (2, 2, 16, 16), profile_of("a100"))
    found = choices_of(dry, (1, 1, 2, 2), 0)
    first, last = (
        next(at for at, node in enumerate(found.nodes) if node.path == path)
        for path in ("low.0", "low.5")
    )
    choice = stretch(found, first, last, (True, False))
    assert found.cost(choice) is not None
    before, whole, after = all_stretches(found, choice)
    assert sum(one.functions for one in (before, whole, after)) == len(found.nodes)
    assert [one.whole for one in (before, whole, after)] == [
        {2: False, 3: False}, {2: True, 3: False}, {2: False, 3: False},
    ]  # fmt: skip
    assert (whole.first, whole.last) == ("low.0 (conv2d)", "low.5 (conv2d)")
    # Two workers swap blocks of 2 x 4 x 2 x 2 cells, and their gradients.
    assert whole.entering_bytes == 2 * (2 * 4 * 2 * 2) * 4
    assert before.entering_bytes == 0


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sums_of_functions_are_the_time_of_a_step(amp: torch.dtype | None) -> None:
    """They also follow casts, layouts, and what a checkpoint repeats."""
    profile, grid = replace(profile_of("a100"), wire="host"), (1, 1, 2, 1, 1)
    kept: list[int] = []
    for repeats in (False, True):
        network = UNet3d(1, 2, 4, 2)
        dry = dry_network(network, (1, 1, 32, 32, 32), profile, True, "adam", repeats, amp)
        found = choices_of(dry, grid, 0)
        # The first half of a block, which moves its input.
        first = next(at for at, node in enumerate(found.nodes) if node.path == "down.1.0")
        planned = stretch(found, first, first + 2, (True,))
        cost, other = found.cost((0,) * len(found.variables)), found.cost(planned)
        assert cost is not None and other is not None
        step_s = dry.rehearse(grid, 0).seconds(False)
        # A step also sums gradients of copies, under every plan alike.
        assert cost[0] < step_s < cost[0] + 50e-6
        plan = Plan(layouts=found.pins(planned, dict(dry.network.named_modules())))
        changed_s = dry.rehearse(grid, 0, plan).seconds(False) - step_s
        assert other[0] - cost[0] == pytest.approx(changed_s, abs=1e-8)
        kept.append(cost[1])
        casts = any(one.dtype == amp for node in found.nodes for one in node.outputs)
        assert casts == (amp is not None)
    assert kept[1] < 0.5 * kept[0]


@pytest.mark.usefixtures("_only_one_plan_rehearsed")
def test_blocks_are_recomputed_if_no_plan_fits_otherwise() -> None:
    how: Any = dict(global_shape=(1, 1, 32, 32, 32), P_x=(1, 1, 2, 1, 1))
    network, note = UNet3d(1, 2, 4, 2), "every block is recomputed"
    before = advice_on(DryNetwork(network, how["global_shape"], SLOW), how["P_x"]).memory_bytes
    for limit, repeats in ((2.0, False), (0.8, True)):
        profile = replace(SLOW, memory_gib=limit * before / 2**30)
        found = search(network, profile=profile, recompute=None, **how)
        assert any(one.startswith(note) for one in found.notes) == repeats
        assert found.recomputed == (["down.0", "down.1", "up.0"] if repeats else [])
        dry = DryNetwork(network, how["global_shape"], profile)
        assert advice_on(dry, how["P_x"], plan=found).fits
    with pytest.raises(ShapeError, match="or recompute=True"):
        search(network, profile=profile, **how)


@pytest.mark.usefixtures("_only_one_plan_rehearsed")
def test_the_best_of_the_grids_of_a_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_search, "_GRIDS", 2)
    alone = rank_grids(DryNetwork(Skips(), SHAPE, SLOW), 2)
    found = search(Skips(), SHAPE, profile=SLOW, workers=2)
    assert Plan.from_text(found.to_text()) == found
    grids = found.notes[1].removeprefix("grids with their layouts: ")
    assert grids.startswith(str(list(found.grid or ())))
    # Plans may be faster on a grid that is slower without one.
    assert {str(list(one.grid)) for one in alone[:2]} == set(re.findall(r"\[.*?\]", grids))


def test_a_grid_that_does_not_split_the_batch_is_searched() -> None:
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU())
    dry = DryNetwork(network, (8, 2, 64, 32), SLOW)
    best = rank_grids(dry, 8, 5)
    assert all(one.grid[0] > 1 for one in best[:3])
    found = starts_of(dry, 8)
    assert found[:2] == best[:2]
    assert found[2].grid == (1, 1, 8, 1)
    # It takes the place of none if one does not split the batch anyway.
    few = DryNetwork(network, (1, 2, 64, 32), SLOW)
    assert starts_of(few, 8) == rank_grids(few, 8, 5)[:3]


@pytest.mark.usefixtures("_only_one_plan_rehearsed")
def test_the_fewest_workers_on_which_a_step_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_search, "fits", partial(fits, most=2))
    dry = DryNetwork(Skips(), SHAPE, SLOW)
    two, one = (advice_on(dry, (1, 1, n, 1)).memory_bytes for n in (2, 1))
    assert 1.1 * two < one
    limit = 1.1 * two / 2**30
    found = search(Skips(), SHAPE, profile=SLOW, memory_gib=limit)
    assert found.grid is not None and prod(found.grid) == 2
    with pytest.raises(ShapeError, match=r"search: on .* a step needs"):
        search(Skips(), SHAPE, profile=SLOW, memory_gib=0.5 * limit)
    with pytest.raises(ShapeError, match="fewest workers of a training step"):
        search(Skips(), SHAPE, profile=SLOW, memory_gib=limit, training=False)
    with pytest.raises(ShapeError, match="P_x and workers=2 are both given"):
        search(Skips(), SHAPE, SPLIT, SLOW, workers=2)


@distributed(ranks=[2, 4], transports=["loopback"])
def test_searched_plans_compute_what_the_network_alone_computes(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, P_world.size // 2])
    # Fast enough for the large tensors to stay split, and slow enough for the small to be whole.
    profile = replace(SLOW, tflops=1e-3, network=Link(300.0, 10.0, 10.0))
    found = search(Skips(), SHAPE, P_x, profile)
    assert found.layouts
    assert {one.path for one in found.layouts} != {""}

    def edit(plan: Plan) -> None:
        plan.layouts += found.layouts

    assert_as_alone(Skips, P_x, [(2, 2, 16, 16)], edit)


@distributed(ranks=2, transports=["loopback"])
def test_all_workers_get_the_error_of_the_first(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    with pytest.raises(ShapeError, match="cannot be called"):
        search(Skips(), (1, 3, 16, 16), P_x, "h100")

    def fail(*_: Any) -> None:
        raise KeyError("a bug")

    with pytest.raises(ShapeError, match="KeyError: 'a bug'"):
        search(Skips(), (1, 2, 16, 16), P_x, "h100", progress=fail)


class Blocks(nn.Module):
    """Blocks that are recomputed, the second one on small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1))
            for a in (2, 4)
        )
        self.last = nn.Conv2d(4, 2, 3, padding=1)
        recompute(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](x)
        z = self.blocks[1](F.max_pool2d(y, 2))
        return self.last(y + F.interpolate(z, scale_factor=2.0))


@distributed(ranks=2, transports=["loopback"])
def test_the_world_gets_a_grid_and_a_plan_of_recomputed_blocks(P_world: Partition) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_search, "_REHEARSED", 2)
        patch.setattr(layout_search, "_GRIDS", 1)
        found = search(Blocks(), (1, 2, 16, 16), P_world, SLOW, amp=torch.bfloat16)
    assert found.grid is not None and found.layouts
    P_x = P_world.create_cartesian_topology_partition(found.grid)

    def edit(plan: Plan) -> None:
        plan.layouts += found.layouts

    assert_as_alone(Blocks, P_x, [(1, 2, 16, 16)], edit)
