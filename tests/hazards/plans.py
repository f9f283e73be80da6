"""Random modules under random plans: layouts pinned at their functions, on grids factored anew."""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import gpudist
from gpudist import GlobalTensor, Plan
from gpudist.geometry.layout import Sbp, broadcast, split
from gpudist.sbp import dispatch
from gpudist.world.partition import CartesianPartition
from tests.hazards.entries import Entry, Grid
from tests.hazards.judge import in_float64
from tests.hazards.random_modules import Case
from tests.hazards.subjects import Converted, made

PINS = 3
SPLIT = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)  # fmt: skip
_MOST_PINS = 6


def plan_for(case: Case) -> tuple[Plan, Counter[str]]:
    """Return a plan with at least ``PINS`` pins, drawn by the case's name, and what it pins."""
    rng = random.Random(f"plan of {case.name}")
    plan = _split_weights(case)
    kinds = Counter({"split weights": len(plan.weights)})
    rows, meetings = _planned(case, plan)
    seen = Counter[tuple[str, str]]()
    places: list[tuple[str, str, int]] = []
    for row in rows:
        name = row.function.rpartition(".")[2]
        if name != "to_global":
            places.append((row.path, name, seen[row.path, name]))
            seen[row.path, name] += 1
    rng.shuffle(places)
    wanted = rng.randint(PINS, _MOST_PINS)
    for path, name, call in places:
        grid = _factored(prod(case.grid), rng)
        sbp = [_attribute(case, parts, rng) for parts in grid]
        at: Any = rng.choice(("input", "output"))
        longer = copy.deepcopy(plan)
        longer.layout(path, sbp, call=call, at=at, function=name, grid=grid)
        if not _fits(case, longer):
            continue
        plan = longer
        used = [one for one, n in zip(sbp, grid, strict=True) if n > 1]
        kinds["copies" if not any(one.is_split for one in used) else "blocks"] += 1
        kinds["copies of blocks"] += len({one.is_split for one in used}) > 1
        kinds["channels"] += any(one.dim == 1 for one in used)
        kinds["given sizes"] += any(one.sizes is not None for one in used)
        kinds["another grid"] += grid != tuple(n for n in case.grid if n > 1)
        kinds["fewer workers"] += prod(grid) < prod(case.grid)
        if len(plan.layouts) == wanted:
            break
    # The judge names a refusal.
    with suppress(gpudist.GpudistError):
        kinds["skip across a change"] += _planned(case, plan)[1] > meetings
    return plan, kinds


def _split_weights(case: Case) -> Plan:
    """Return a plan that splits the weights of layers, where a drawn grid allows it."""
    rng = random.Random(f"weights of {case.name}")
    plan = Plan()
    for path, module in made(case.entry()).named_modules():
        if isinstance(module, SPLIT):
            is_linear = isinstance(module, nn.Linear)
            shape = [1] * (1 + (len(case.shape) if is_linear else module.weight.dim()))
            for n in _factored(prod(case.grid), rng):
                shape[rng.randrange(len(shape))] *= n
            longer = copy.deepcopy(plan)
            longer.split_weight(path, shape)
            with suppress(gpudist.ConversionError), in_float64():
                gpudist.plan_of(made(case.entry()), case.grid, case.shape, plan=longer)
                plan = longer
    return plan


def _planned(case: Case, plan: Plan) -> tuple[list[Any], int]:
    """Return the rows of a forward, and how many functions get tensors of different layouts."""
    meetings = 0
    on_one_placement = dispatch._on_one_placement

    def counting(kind: Any, scope: Any, tensors: list[Any], in_place: bool) -> list[Any]:
        nonlocal meetings
        given = [x for x in tensors if isinstance(x, GlobalTensor) and x.dim() > 1]
        ends = [(x.dim(), x.placement, x.sbp) for x in given]
        meetings += any(a != b and a[0] == b[0] for a, b in pairwise(ends))
        return on_one_placement(kind, scope, tensors, in_place)

    with in_float64(), patch.object(dispatch, "_on_one_placement", counting):
        x = torch.empty(case.shape, device="meta")
        rows = gpudist.plan_of(made(case.entry()), case.grid, x, plan=plan).rows
    return rows, meetings


def _fits(case: Case, plan: Plan) -> bool:
    """Return whether the pinned tensors have the dims and extents that the pins split."""
    try:
        _planned(case, plan)
    except gpudist.GpudistError as error:
        return not any(
            text in str(error)
            for text in ("it has no dim", "sizes add up", "not used", "has no function")
        )
    return True


def _factored(workers: int, rng: random.Random) -> Grid:
    grids: dict[int, list[Grid]] = {
        3: [(3,), (3,), (2,)],
        4: [(4,), (4,), (2, 2), (2, 2), (2,), (3,)],
        6: [(6,), (2, 3), (3, 2), (2, 2), (4,)],
    }
    return rng.choice(grids.get(workers, [(workers,)]))


def _attribute(case: Case, parts: int, rng: random.Random) -> Sbp:
    kind = rng.choice((broadcast, broadcast, split(0), split(1), split(2), split(2), None))
    if kind is not None:
        return kind
    dim = rng.choice((0, 1, 2))
    ends = sorted(rng.randint(0, case.shape[dim]) for _ in range(parts - 1))
    return split(dim, [b - a for a, b in pairwise([0, *ends, case.shape[dim]])])


class Planned(Converted):
    """A network converted under a plan."""

    def __init__(self, plan: Plan, entry: Entry, P_x: CartesianPartition | None) -> None:
        # A world of one, which judges random numbers, has no other grids.
        self.plan = plan if P_x is not None and P_x.size > 1 else None
        super().__init__(entry, P_x)

    def whole(self, y: torch.Tensor) -> torch.Tensor:
        return super().whole(self._everywhere(y))

    def weighted(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().weighted(self._everywhere(y), weights)

    def _everywhere(self, y: torch.Tensor) -> torch.Tensor:
        if not isinstance(y, GlobalTensor) or y.placement == self.placement:
            return y
        return y.to_global(self.placement, self.copies)

    def distributed(self, network: nn.Module, said: Any) -> nn.Module:
        assert self.P_x is not None
        return gpudist.distribute(network, self.P_x, self.plan, inputs=said)


def judged(case: Case) -> tuple[Any, Counter[str]]:
    """Return the verdict on a case under its plan, and what the plan pins."""
    plan, kinds = plan_for(case)
    subject: Any = partial(Planned, plan)
    return case.judge(subject), kinds
