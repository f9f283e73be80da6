"""Search the fastest plan of layouts of a network on a grid, before any worker is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpudist.checks.arguments import checked
from gpudist.convert.converted import conversion_of
from gpudist.convert.network_plan import NetworkPlan
from gpudist.errors import GpudistError, ShapeError
from gpudist.planning.advice import Advice, advice_on, dry_network
from gpudist.planning.explanation import explained
from gpudist.planning.forward_graph import ForwardGraph
from gpudist.planning.hardware import Profile, profile_of, profile_of_device
from gpudist.planning.layout_choices import Choice, LayoutChoices
from gpudist.planning.layout_costs import LayoutCosts
from gpudist.planning.rehearsal import DryNetwork
from gpudist.sbp.pins import Pin, Pins
from gpudist.transport.dry import META
from gpudist.world.partition import CartesianPartition, Partition
from gpudist.world.runtime import process_grid

# Number of plans that are rehearsed as a whole.
_REHEARSED = 10
# Steps of the search for the price of a byte, each of which halves its interval.
_PRICES = 12


@checked()
def search(
    network: nn.Module | Sequence[nn.Module],
    global_shape: Sequence[int] | torch.Tensor | Sequence[Sequence[int] | torch.Tensor],
    P_x: CartesianPartition | DeviceMesh | Sequence[int],
    profile: str | Path | Profile | None = None,
    *,
    memory_gib: float | None = None,
    training: bool = True,
    replicate_parameters: bool = True,
    optimizer: str = "adam",
) -> NetworkPlan:
    """Return the fastest plan of layouts for a network whose input is split over ``P_x``.

    For every function that the forward calls, the search chooses along which axes of the grid the
    tensors are split, as without a plan, and along which every worker computes the whole. Small
    tensors are often faster whole, since nothing is sent between copies. Axes that split the batch
    stay as they are, and so do the outputs of the network.

    The functions are timed one by one on tensors without data, and so are moves between layouts.
    The fastest sums of these times are found exactly; the ten best are rehearsed as a whole, where
    messages overlap with kernels, together with the network without a plan. The search therefore
    never returns a plan that :func:`plan` predicts to be slower than none.

    Pins name modules and functions, so the plan also holds for inputs of other shapes. It is the
    fastest for the given one; search again if the input becomes much larger or smaller.

    Args:
        network: network of torch modules, or a list of layers called one after the other.
        global_shape: global shape of its input, or a tensor that has the shape and dtype; of
            several inputs, a list of these.
        P_x: partition as for :func:`gpudist.distribute`, or its shape. If it is a partition
            of a world, all workers of the world must call; the first one searches for all.
        profile: profile of the machine, as for :func:`plan`; by default the built-in one of this
            device.
        memory_gib: memory of a worker in GiB that the plan may need at most; by default that of
            the profile.
        training: whether to count backward, the gradients and the optimizer.
        replicate_parameters: see :func:`gpudist.distribute`.
        optimizer: name of the optimizer, as for :func:`plan`.

    Returns:
        Plan for ``gpudist.distribute(network, P_x, plan)``. Printed, it explains itself: for each
        stretch of functions what was chosen, how much time it saves, and the next best. It has no
        layouts if none saves time.

    Cost:
        Seconds to a minute on one core, and one broadcast of the plan's text.

    Raises:
        ShapeError: on every rank alike, if the device is a CPU or has no built-in profile, the
            network cannot be called with such an input, or no plan fits into the memory.
        GpudistError: if the network cannot be converted for this partition.
    """
    grid = tuple(P_x.shape if isinstance(P_x, CartesianPartition | DeviceMesh) else P_x)

    def searched() -> NetworkPlan:
        machine = profile_of_device() if profile is None else profile
        machine = machine if isinstance(machine, Profile) else profile_of(machine)
        dry = dry_network(
            network, global_shape, machine, replicate_parameters, optimizer, False, None
        )
        dry.training = training
        limit_gib = machine.memory_gib if memory_gib is None else memory_gib
        return Search(dry, grid, int(limit_gib * 2**30)).plan()

    if isinstance(P_x, DeviceMesh):
        P_x = process_grid(P_x)
    if not isinstance(P_x, CartesianPartition) or P_x.world.size == 1:
        return searched()
    return _from_first(P_x.world, searched)


def choices_of(dry: DryNetwork, grid: Sequence[int], rank: int) -> LayoutChoices:
    """Return the layouts that the functions of a network may have, and their costs on a rank."""
    network, inputs, clock = dry.converted(grid, rank)
    conversion = conversion_of(network)
    scope = conversion.scope
    graph = ForwardGraph(scope.placement)
    scope.pins = graph
    with torch.device(META), torch.set_grad_enabled(dry.training):
        outputs = network(*inputs)
    scope.pins = Pins([])
    costs = LayoutCosts(scope, clock, dry.training)
    return LayoutChoices(graph, costs, outputs, conversion.entrance.axes)


class Search:
    """Search of the layouts of a network on one grid.

    Args:
        dry: the network.
        grid: shape of the partition of its input.
        limit_bytes: memory that a rank has; 0 for any.

    Attributes:
        alone: prediction for the network without a plan.
        choices: layouts that the functions may have.
    """

    def __init__(self, dry: DryNetwork, grid: tuple[int, ...], limit_bytes: int) -> None:
        self.dry, self.grid, self.limit_bytes = dry, grid, limit_bytes
        self.alone = advice_on(dry, grid)
        self.choices = choices_of(dry, grid, self.alone.slowest.rank)
        self.modules = dict(dry.network.named_modules(remove_duplicate=False))

    @property
    def home(self) -> Choice:
        """The choice without a plan."""
        return (0,) * len(self.choices.variables)

    def plan(self) -> NetworkPlan:
        """Return the plan with the smallest predicted time that fits.

        Raises:
            ShapeError: none fits.
        """
        best, chosen, pins = self.alone, self.home, list[Pin]()
        for choice in self._candidates():
            own = self.pins(choice)
            try:
                advice = advice_on(self.dry, self.grid, plan=NetworkPlan(layouts=own))
            # A plan that cannot be followed is none.
            except GpudistError:
                continue
            if self._order(advice) < self._order(best):
                best, chosen, pins = advice, choice, own
        if not self._fits(best):
            raise ShapeError(
                f"search: on {list(self.grid)} a step needs {best.memory_bytes / 2**30:.2f} GiB on "
                f"each worker, but it may use {self.limit_bytes / 2**30:.2f} GiB; use more "
                "workers, or gpudist.planning.recompute(network)"
            )
        notes = explained(self.choices, chosen, best, self.alone, self.dry.profile.name)
        return NetworkPlan(layouts=pins, notes=notes)

    def pins(self, choice: Choice) -> list[Pin]:
        return self.choices.pins(choice, self.modules)

    def _order(self, one: Advice) -> tuple[bool, float]:
        return not self._fits(one), one.seconds

    def _fits(self, one: Advice) -> bool:
        return not self.limit_bytes or one.memory_bytes <= self.limit_bytes

    def _candidates(self) -> Iterator[Choice]:
        """Yield the best choices that should fit, each with pins of its own."""
        found = self.choices.solve(_REHEARSED).found
        if self.limit_bytes:
            found = self._that_fit(found)
        seen: set[tuple[Pin, ...]] = {()}
        for _, choice in found:
            key = tuple(self.pins(choice))
            if key not in seen:
                seen.add(key)
                yield choice

    def _that_fit(self, found: list[tuple[float, Choice]]) -> list[tuple[float, Choice]]:
        """Return the best choices at the lowest price of a byte at which the best one fits."""
        before = self._kept_bytes(self.home)
        free_bytes = self.limit_bytes - self.alone.memory_bytes

        def fits(choices: list[tuple[float, Choice]]) -> bool:
            return self._kept_bytes(choices[0][1]) - before <= free_bytes

        if fits(found):
            return found
        # At the highest price, a byte costs as much as the whole step.
        low, high = 1e-18, self.alone.seconds
        for _ in range(_PRICES):
            price = (low * high) ** 0.5
            solved = self.choices.solve(_REHEARSED, price).found
            if fits(solved):
                high, found = price, solved
            else:
                low = price
        return found

    def _kept_bytes(self, choice: Choice) -> int:
        cost = self.choices.cost(choice)
        assert cost is not None
        return cost[1]


def _from_first(P_world: Partition, searched: Callable[[], NetworkPlan]) -> NetworkPlan:
    """Return on every worker the plan that the first one finds.

    Raises:
        ShapeError: on every worker, if the first one cannot find a plan.
    """
    text, error = "", ""
    if P_world.rank == 0:
        try:
            text = searched().to_text()
        except GpudistError as one:
            error = str(one)
    sizes = [len(part.encode()) for part in (text, error)]
    data = [*sizes, *f"{text}{error}".encode()]
    size, _, *found = map(int, P_world.broadcast_data(data if P_world.rank == 0 else None))
    if len(found) > size:
        raise ShapeError(bytes(found).decode())
    return NetworkPlan.from_text(bytes(found).decode())
