"""Search the fastest plan of layouts of a network, before any worker is started."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from threading import RLock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpudist.checks.arguments import checked
from gpudist.convert.block_checkpoints import blocks_of
from gpudist.convert.converted import conversion_of
from gpudist.convert.network_plan import NetworkPlan
from gpudist.errors import GpudistError, ShapeError
from gpudist.planning.advice import (
    Advice,
    Progress,
    advice_below,
    advice_on,
    dry_network,
    order,
    rank_grids,
    seconds_to_beat,
)
from gpudist.planning.explanation import all_stretches, explain
from gpudist.planning.first_worker import from_first
from gpudist.planning.fitting import Fit, fits, smallest
from gpudist.planning.forward_graph import ForwardGraph
from gpudist.planning.grids import estimate_s, grids
from gpudist.planning.hardware import Profile, profile_of, profile_of_device
from gpudist.planning.layout_choices import Choice, Cost, LayoutChoices
from gpudist.planning.layout_costs import LayoutCosts
from gpudist.planning.rehearsal import DryNetwork
from gpudist.planning.table import bytes_of, seconds_of
from gpudist.sbp.pins import Pin, Pins
from gpudist.world.partition import CartesianPartition, Partition
from gpudist.world.runtime import process_grid

# Number of plans that are rehearsed as a whole.
_REHEARSED = 10
# Number of grids of the same workers that are planned, of which the fastest are searched.
_PLANNED = 5
# Number of grids of the same workers that are searched.
_GRIDS = 3
# Steps of the search for the price of a byte, each of which halves its interval.
_PRICES = 12
# Number of new objects after which Python looks for cycles during a search.
_NEW_OBJECTS = 50_000
_searching = RLock()


@contextmanager
def _few_garbage_collections() -> Iterator[None]:
    """Have Python look for cycles seldom, which would take a fifth of the time of a search.

    One search at a time changes this setting of the process.
    """
    with _searching:
        before = gc.get_threshold()
        # 0 if the user has turned it off.
        gc.set_threshold(before[0] and max(before[0], _NEW_OBJECTS), *before[1:])
        try:
            yield
        finally:
            gc.set_threshold(*before)


@checked()
def search(
    network: nn.Module | Sequence[nn.Module],
    global_shape: Sequence[int] | torch.Tensor | Sequence[Sequence[int] | torch.Tensor],
    P_x: Partition | DeviceMesh | Sequence[int] | None = None,
    profile: str | Path | Profile | None = None,
    *,
    workers: int | None = None,
    memory_gib: float | None = None,
    training: bool = True,
    replicate_parameters: bool = True,
    optimizer: str = "adam",
    amp: torch.dtype | None = None,
    recompute: bool | None = False,
    progress: Progress | None = None,
) -> NetworkPlan:
    """Return the fastest plan of layouts for a network whose input is split over a partition.

    For every function that the forward calls, the search chooses along which axes of the grid the
    tensors are split, as without a plan, and along which every worker computes the whole. Small
    tensors are often faster whole, since nothing is sent between copies. Axes that split the batch
    stay as they are, and so do the outputs of the network.

    The functions are timed one by one on tensors without data, and so are moves between layouts.
    The fastest sums of these times are found exactly. Of the ten best, those that are faster than
    without a plan are rehearsed as a whole, where messages overlap with kernels. The search
    therefore never returns a plan that :func:`plan` predicts to be slower than none.

    Without a grid, the three grids that :func:`plan` with ``best=5`` ranks best are searched, and
    the fastest plan wins; :attr:`NetworkPlan.grid` is its grid. If all three split the batch, the
    third one is a grid that does not, since along the batch no tensor is whole.

    Pins name modules and functions, so the plan also holds for inputs of other shapes. It is the
    fastest for the given one; search again if the input becomes much larger or smaller.

    Args:
        network: network of torch modules, or a list of layers called one after the other.
        global_shape: global shape of its input, or a tensor that has the shape and dtype; of
            several inputs, a list of these.
        P_x: partition as for :func:`gpudist.distribute`, or its shape; or a partition that has no
            grid, such as the world, whose grid is to be chosen. If it is a partition of a world,
            all workers of the world must call; the first one searches for all.
        profile: profile of the machine, as for :func:`plan`; by default the built-in one of this
            device.
        workers: number of workers whose grid is to be chosen, instead of ``P_x``. Without both, it
            is the smallest number, up to 64, on which a training step fits; see :func:`fits`.
        memory_gib: memory of a worker in GiB that the plan may need at most; by default that of
            the profile.
        training: whether to count backward, the gradients and the optimizer.
        replicate_parameters: see :func:`gpudist.distribute`.
        optimizer, amp: as for :func:`plan`.
        recompute: whether the plan recomputes every block of the network in backward, as
            :func:`recompute` does; ``None`` recomputes if no plan fits otherwise.
        progress: function called with the next item, the number of finished items, and the total.

    Returns:
        Plan for ``gpudist.distribute(network, P_x, plan)``, with ``P_x`` on the plan's grid.
        Printed, it explains itself: for each stretch of functions what was chosen, how much time it
        saves, and the next best. It has no layouts if none saves time.

    Cost:
        Seconds to a minute on one core for each grid, and one broadcast of the plan's text.

    Raises:
        ShapeError: on every rank alike, if the device is a CPU or has no built-in profile, the
            network cannot be called with such an input, or no plan fits into the memory.
        GpudistError: if the network cannot be converted for this partition.
    """
    if isinstance(P_x, DeviceMesh):
        P_x = process_grid(P_x)
    if P_x is not None and workers is not None:
        raise ShapeError(
            f"search: P_x and workers={workers} are both given; pass P_x, or workers alone to have "
            "its grid chosen"
        )
    if workers is None and P_x is None and not training:
        raise ShapeError(
            "search: without P_x and workers, it looks for the fewest workers of a training step; "
            "pass workers= for training=False"
        )
    grid, ranks = None, workers
    if isinstance(P_x, Partition):
        grid, ranks = P_x.shape if isinstance(P_x, CartesianPartition) else None, P_x.size
    elif P_x is not None:
        grid = tuple(P_x)

    @_few_garbage_collections()
    def find() -> NetworkPlan:
        machine = profile_of_device() if profile is None else profile
        machine = machine if isinstance(machine, Profile) else profile_of(machine)
        if memory_gib is not None:
            machine = replace(machine, memory_gib=memory_gib)
        for repeats in (False, True) if recompute is None else (recompute,):
            dry = dry_network(
                network, global_shape, machine, replicate_parameters, optimizer, repeats, amp
            )
            dry.training = training
            if grid is not None and len(grid) != len(dry.global_shape):
                raise ShapeError(
                    f"search: the grid {list(grid)} does not split an input of "
                    f"{len(dry.global_shape)} dims; give one number per dim"
                )
            if grid is not None:
                starts = [advice_on(dry, grid)]
            elif ranks is not None:
                starts = starts_of(dry, ranks)
            else:
                all_fits = fits(
                    network, global_shape, 0.0, machine, replicate_parameters=replicate_parameters,
                    optimizer=optimizer, recompute=repeats, amp=amp,
                )  # fmt: skip
                starts = _on_fewest_workers(dry, all_fits)
            searches = list[Search]()
            for start in starts:
                if progress is not None:
                    progress(f"layouts on {list(start.grid)}", len(searches), len(starts))
                searches.append(Search(dry, start))
            if progress is not None:
                progress("", len(starts), len(starts))
            searches.sort(key=lambda result: order(result.best))
            if searches[0].best.fits is not False:
                return _plan_of(searches, repeats)
        instead = "" if repeats else ", or recompute=True"
        raise ShapeError(f"{searches[0].too_much}; use more workers{instead}")

    if not isinstance(P_x, Partition) or P_x.world.size == 1:
        return find()
    return NetworkPlan.from_text(from_first(P_x.world, lambda: find().to_text()))


def _on_fewest_workers(dry: DryNetwork, all_fits: Sequence[Fit]) -> list[Advice]:
    least = smallest(all_fits)
    if least is None:
        return [advice_on(dry, min(all_fits, key=lambda fit: fit.memory.total).grid)]
    best = starts_of(dry, least.ranks)
    return best if best[0].fits else [advice_on(dry, least.grid)]


def starts_of(dry: DryNetwork, ranks: int) -> list[Advice]:
    """Return the grids to search: those that rank best without a plan.

    Along the batch, tensors are never whole. If all grids split it, the last one is replaced by
    the grid with the smallest estimate that does not.
    """
    best = rank_grids(dry, ranks, _PLANNED if ranks > 4 else None, wanted=_GRIDS)
    if len(best) < _GRIDS or any(entry.grid[0] == 1 for entry in best):
        return best
    axes = range(1, len(dry.global_shape))
    for grid in sorted(
        grids(ranks, dry.global_shape, axes), key=lambda shape: estimate_s(dry, shape)
    ):
        with suppress(GpudistError):
            return [*best[:-1], advice_on(dry, grid)]
    return best


def _plan_of(searches: Sequence[Search], repeats: bool) -> NetworkPlan:
    """Return the plan of the first search, with notes on what else was chosen."""
    plan = searches[0].plan()
    if len(searches) > 1:
        words = (
            f"{list(result.alone.grid)} {seconds_of(result.best.seconds)}" for result in searches
        )
        plan.notes.insert(1, f"grids with their layouts: {', '.join(words)}")
    if repeats:
        plan.notes.insert(1, "every block is recomputed in backward")
        plan.recomputed = list(blocks_of(searches[0].dry.network))
    return plan


def choices_of(dry: DryNetwork, grid: Sequence[int], rank: int) -> LayoutChoices:
    """Return the layouts that the functions of a network may have, and their costs on a rank."""
    network, inputs, clock = dry.convert(grid, rank)
    conversion = conversion_of(network)
    scope = conversion.scope
    graph = ForwardGraph(scope.placement)
    scope.pins = graph
    with dry.on_meta(), torch.set_grad_enabled(dry.training):
        outputs = network(*inputs)
    scope.pins = Pins([])
    costs = LayoutCosts(scope, clock, dry.training)
    return LayoutChoices(graph, costs, outputs, conversion.entrance.axes)


class Search:
    """Search of the layouts of a network on one grid.

    Args:
        dry: the network.
        alone: prediction for the network without a plan, on the grid.

    Attributes:
        choices: layouts that the functions may have.
        best: prediction for the plan with the smallest time, of those that fit if any does.
        chosen: choice of that plan.
        layouts: layouts of that plan.
    """

    def __init__(self, dry: DryNetwork, alone: Advice) -> None:
        self.dry, self.alone = dry, alone
        self.limit_bytes = int(dry.profile.memory_gib * 2**30)
        self.choices = choices_of(dry, alone.grid, alone.slowest.rank)
        self.modules = dict(dry.network.named_modules(remove_duplicate=False))
        self.best, self.chosen, self.layouts = alone, self.home, list[Pin]()
        for choice, layouts in self._candidates():
            try:
                advice = advice_below(
                    dry, alone.grid, seconds_to_beat(self.best), plan=NetworkPlan(layouts=layouts),
                    first=alone.slowest.rank,
                )  # fmt: skip
            # A plan that cannot be followed is none.
            except GpudistError:
                continue
            if advice is not None and order(advice) < order(self.best):
                self.best, self.chosen, self.layouts = advice, choice, layouts

    @property
    def home(self) -> Choice:
        """The choice without a plan."""
        return (0,) * len(self.choices.variables)

    @property
    def too_much(self) -> str:
        """Error of a search of which no plan fits."""
        return (
            f"search: on {list(self.alone.grid)} a step needs {bytes_of(self.best.memory_bytes)} "
            f"on each worker, but it may use {bytes_of(self.limit_bytes)}"
        )

    def plan(self) -> NetworkPlan:
        """Return the plan of the best choice, which explains itself."""
        notes = explain(self.choices, self.chosen, self.best, self.alone, self.dry.profile.name)
        return NetworkPlan(
            layouts=self.layouts, notes=notes, grid=self.alone.grid,
            stretches=all_stretches(self.choices, self.chosen),
        )  # fmt: skip

    def _candidates(self) -> Iterator[tuple[Choice, list[Pin]]]:
        """Yield the best choices that should fit, each with its pins, which no other has.

        If the network fits without a plan, choices with larger sums of times are left out.
        """
        if len(self.choices.states) == 1:
            return
        solutions = self.choices.solve(_REHEARSED).best
        if self.limit_bytes:
            solutions = self._that_fit(solutions)
        most_s = inf if self.alone.fits is False else self._cost(self.home)[0]
        seen: list[list[Pin]] = [[]]
        for _, choice in solutions:
            pins = self.choices.pins(choice, self.modules)
            if pins not in seen and self._cost(choice)[0] <= most_s:
                seen.append(pins)
                yield choice, pins

    def _that_fit(self, solutions: list[tuple[float, Choice]]) -> list[tuple[float, Choice]]:
        """Return the best choices at the lowest price of a byte at which the best one fits."""
        before = self._cost(self.home)[1]
        free_bytes = self.limit_bytes - self.alone.memory_bytes

        def fits(choices: list[tuple[float, Choice]]) -> bool:
            return self._cost(choices[0][1])[1] - before <= free_bytes

        if fits(solutions):
            return solutions
        # At the highest price, a byte costs as much as the whole step.
        low, high = 1e-18, self.alone.seconds
        for _ in range(_PRICES):
            price = (low * high) ** 0.5
            priced = self.choices.solve(_REHEARSED, price).best
            if fits(priced):
                high, solutions = price, priced
            else:
                low = price
        return solutions

    def _cost(self, choice: Choice) -> Cost:
        cost = self.choices.cost(choice)
        assert cost is not None
        return cost
