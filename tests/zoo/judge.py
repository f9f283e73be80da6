"""One network of the zoo, converted on a grid of workers, compared with itself alone."""

from __future__ import annotations

import copy
import functools
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import torch
from torch import nn

import gpudist
from gpudist.errors import GpudistError, PlanMismatch, RemoteError, TransportError
from gpudist.planning import search
from gpudist.testing import run_distributed
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import own_block
from tests.zoo.network import Input, Network, Size
from tests.zoo.networks import network_named
from tests.zoo.prepare import in_dtype_of, inputs_of, prepared
from tests.zoo.record import Record, differences, has_drawn, kept_bytes_of, record_of
from tests.zoo.sent import Sent

# Workers along the first and the second spatial dim; grids with three have uneven blocks.
GRIDS: dict[str, tuple[int, ...]] = {
    "2x1": (2, 1), "2x2": (2, 2), "3": (3,), "1x3": (1, 3), "3x2": (3, 2)
}  # fmt: skip
# What makes the network that is judged, in the second mode under a searched plan of layouts. The
# last two judge the judge: the network alone on each rank is right, and the same with one gradient
# a thousandth larger on the last rank is wrong.
Mode = Literal["distribute", "searched", "sequential", "tampered"]
_CONVERTED = ("distribute", "searched")
# Profile of the machine for which plans are searched.
_PROFILE = "h100"
LIMIT_S = 300.0


@dataclass
class Verdict:
    """Verdict on a network on a grid.

    Attributes:
        name, grid, mode: identify the case.
        verdict: ``"right"``; ``"wrong"``; ``"refused"`` by an error of gpudist that says so; or
            ``"failed"`` by any other error.
        error: largest error over all ranks, relative to the largest number.
        what: the tensor with that error.
        text: the error that was raised.
        seconds: time of two steps on all ranks, which share the processor.
        alone_seconds: time of two steps of the network alone.
        messages: number of messages that all ranks together send in a training step.
        sent_bytes: bytes in them.
        repartitioned_bytes: those of automatic repartition; see :mod:`tests.zoo.sent`.
        kept_bytes: bytes that a forward keeps for backward, without parameters and buffers, on the
            rank that keeps most.
        alone_kept_bytes: the same of the network alone.
        forward_bytes: bytes sent by all ranks together in a forward of its first entry.
        planned_bytes: prediction of ``forward_bytes`` by ``plan_of``; ``None`` if values decide it.
        layouts: number of layouts that the plan prescribes.
        warned: warnings of gpudist, each once.
    """

    name: str
    grid: str
    mode: Mode = "distribute"
    verdict: Literal["right", "wrong", "refused", "failed"] = "failed"
    error: float = float("inf")
    what: str = ""
    text: str = ""
    seconds: float = 0.0
    alone_seconds: float = 0.0
    messages: int = 0
    sent_bytes: int = 0
    repartitioned_bytes: int = 0
    kept_bytes: int = 0
    alone_kept_bytes: int = 0
    forward_bytes: int = 0
    planned_bytes: int | None = 0
    layouts: int = 0
    warned: list[str] = field(default_factory=list)


@dataclass
class Numbers:
    """Messages and bytes of one rank, as those of :class:`Verdict`."""

    messages: int
    sent_bytes: int
    repartitioned_bytes: int
    kept_bytes: int = 0
    forward_bytes: int = 0
    planned_bytes: int | None = 0


def judge(name: str, grid: str, mode: Mode = "distribute", limit_s: float = LIMIT_S) -> Verdict:
    """Compare a network on a grid with itself alone; errors of either become the verdict.

    A network that draws random numbers draws others alone: it is compared with itself converted on
    one worker. Its ranks are processes, since threads would share one generator.
    """
    found = Verdict(name, grid, mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _compare(network_named(name), found, limit_s)
        except Exception as error:
            found.verdict, found.text = _why(error)
    found.warned = sorted({str(each.message) for each in caught if "gpudist" in each.filename})
    return found


def _compare(network: Network, found: Verdict, limit_s: float) -> None:
    case = (network.name, found.grid, found.mode)
    ranks = prod(GRIDS[found.grid])
    began = time.perf_counter()
    expected, found.alone_kept_bytes = _alone(network.name, _size(network, found.grid))
    body, transport = _judge_rank, "loopback"
    if expected is None:
        (reference,) = run_distributed(
            _record_in_process, 1, *case, transport="host", timeout=limit_s
        )
        expected, _ = reference
        body, transport = _judge_in_process, "host"
    if found.mode == "searched":
        # Before the ranks, which are threads, ask for it.
        found.layouts = len(_fastest_plan(network.name, found.grid).layouts)
    between = time.perf_counter()
    with in_dtype_of(network.name):
        told = run_distributed(body, ranks, *case, expected, transport=transport, timeout=limit_s)
    found.alone_seconds = between - began
    found.seconds = time.perf_counter() - between
    found.error, found.what = max(worst for worst, _ in told)
    numbers = [each for _, each in told]
    found.messages = sum(each.messages for each in numbers)
    found.sent_bytes = sum(each.sent_bytes for each in numbers)
    found.repartitioned_bytes = sum(each.repartitioned_bytes for each in numbers)
    found.kept_bytes = max(each.kept_bytes for each in numbers)
    found.forward_bytes = sum(each.forward_bytes for each in numbers)
    planned = [each.planned_bytes for each in numbers]
    found.planned_bytes = None if None in planned else sum(n for n in planned if n is not None)
    found.verdict = "right" if found.error <= network.tolerance else "wrong"


@functools.cache
def _alone(name: str, size: Size) -> tuple[Record | None, int]:
    """Return the record of a network alone, ``None`` if it draws, and the bytes that it keeps."""
    network, record = network_named(name), None
    with in_dtype_of(name):
        inputs = inputs_of(name, size)
        whole = {key: each.tensor for key, each in inputs.items()}
        learned = _learned(network, inputs)
        net = copy.deepcopy(prepared(name, size))
        if not network.random:
            record = record_of(network, net, _fresh(name, size), whole, whole, learned)
            # A drop path may be on that nobody thought of.
            record = None if has_drawn() else record
        return record, kept_bytes_of(network, net, whole, learned)


def _judge_in_process(
    P_world: Partition, name: str, *case: Any
) -> tuple[tuple[float, str], Numbers]:
    with in_dtype_of(name):
        return _judge_rank(P_world, name, *case)


def _record_in_process(P_world: Partition, name: str, *case: Any) -> tuple[Record, Numbers]:
    with in_dtype_of(name):
        return _record_of_rank(P_world, name, *case)


def _judge_rank(
    P_world: Partition, name: str, grid: str, mode: Mode, expected: Record
) -> tuple[tuple[float, str], Numbers]:
    """Return the largest error on this rank, and its numbers."""
    found, numbers = _record_of_rank(P_world, name, grid, mode)
    if mode in _CONVERTED:
        network = network_named(name)
        P_x = _partition(P_world, network, grid)
        gradients = expected["input gradient"].items()
        blocks = {key: own_block(x, P_x, None, False) for key, x in gradients if x is not None}
        expected = {**expected, "input gradient": {**dict(gradients), **blocks}}
    return max(differences(expected, found)), numbers


def _record_of_rank(P_world: Partition, name: str, grid: str, mode: Mode) -> tuple[Record, Numbers]:
    """Return this rank's results; in a mode without conversion, those of the network alone."""
    network = network_named(name)
    inputs = inputs_of(name, _size(network, grid))
    given = whole = {key: each.tensor for key, each in inputs.items()}
    net = copy.deepcopy(prepared(name, _size(network, grid)))
    plan = _fastest_plan(name, grid) if mode == "searched" and P_world.size > 1 else None
    if mode in _CONVERTED:
        P_x = _partition(P_world, network, grid)
        options: dict[str, Any] = {"methods": network.methods}
        net = gpudist.distribute(net, P_x, plan, **options)
        given = {key: _block(each, P_x) for key, each in inputs.items()}
    last = P_world.rank == P_world.size - 1
    tamper = _enlarge_a_gradient if mode == "tampered" and last else None
    fresh, learned = _fresh(name, _size(network, grid)), _learned(network, inputs)
    step = Sent(P_world)
    record = record_of(network, net, fresh, given, whole, learned, tamper, step)
    numbers = Numbers(step.messages, step.nbytes, step.repartitioned_bytes)
    if mode in _CONVERTED:
        numbers.kept_bytes = kept_bytes_of(network, net, given, learned)
        _add_forward(numbers, network, grid, net, given, whole, P_x, plan)
    return record, numbers


class _Called(Exception):
    """How a network is called."""


class _Caller:
    """Stands for a network that is called, to find out how."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called("forward", args, kwargs)

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise _Called(method, args, kwargs)

        return call


def _first_call(network: Network, given: Mapping[str, torch.Tensor]) -> tuple[str, Any, Any]:
    caller: Any = _Caller()
    try:
        network.call(caller, given)
    except _Called as called:
        return called.args  # pyright: ignore
    raise AssertionError(f"{network.name} is not called")


def _add_forward(
    numbers: Numbers,
    network: Network,
    grid: str,
    net: Any,
    given: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    P_x: CartesianPartition,
    edits: gpudist.Plan | None,
) -> None:
    """Add the bytes of a forward of the converted network, as counted and as planned."""
    world = P_x.world
    method, args, kwargs = _first_call(network, given)
    forward = Sent(world)
    with torch.no_grad(), forward:
        (net if method == "forward" else getattr(net, method))(*args, **kwargs)
    numbers.forward_bytes = forward.nbytes
    _, args, kwargs = _first_call(network, whole)
    alone = prepared(network.name, _size(network, grid))
    plan_of = functools.partial(
        gpudist.plan_of, alone, P_x, *args, named=kwargs, method=method, ranks=world.rank
    )
    try:
        if edits is not None and len(network.methods) > 1:
            edits = layouts_within(edits, plan_of())
        plan = plan_of(plan=edits)
    except gpudist.ConversionError as error:
        if "cannot be planned" not in str(error):
            raise
        numbers.planned_bytes = None
    else:
        numbers.planned_bytes = plan.sent_bytes


def layouts_within(edits: gpudist.Plan, planned: gpudist.Plan) -> gpudist.Plan:
    """Return edits with the layouts of modules that a planned method calls.

    A plan of a forward has layouts that other methods reach; ``plan_of`` refuses one that is not.
    """
    return replace(edits, layouts=[pin for pin in edits.layouts if planned.of(pin.path)])


@functools.cache
def _fastest_plan(name: str, grid: str) -> gpudist.Plan:
    network = network_named(name)
    size = _size(network, grid)
    with in_dtype_of(name):
        inputs = [each.tensor for each in inputs_of(name, size).values()]
        return search(prepared(name, size), inputs, _shape(network, grid), _PROFILE)


def _partition(P_world: Partition, network: Network, grid: str) -> CartesianPartition:
    shape = _shape(network, grid)
    if P_world.size == 1:
        shape = [1] * len(shape)
    return P_world.create_cartesian_topology_partition(shape)


def _shape(network: Network, grid: str) -> list[int]:
    """Return the workers along the dims of the first input that is cut."""
    inputs = inputs_of(network.name, _size(network, grid)).values()
    cut = next(each for each in inputs if each.dims)
    along = GRIDS[grid] if len(cut.dims) > 1 else (prod(GRIDS[grid]),)
    shape = [1] * cut.tensor.dim()
    for dim, workers in zip(cut.dims, along, strict=False):
        shape[dim] = workers
    return shape


def _block(each: Input, P_x: CartesianPartition) -> torch.Tensor:
    return own_block(each.tensor, P_x, None, False) if each.dims else each.tensor


def _size(network: Network, grid: str) -> tuple[int, ...]:
    if 3 not in GRIDS[grid]:
        return network.even
    # The first extent is never a multiple of three: let three workers share it along either dim.
    first, *others = network.odd
    return (others[0], first, *others[1:]) if others and grid == "1x3" else network.odd


def _fresh(name: str, size: Size) -> nn.Module:
    fresh = copy.deepcopy(prepared(name, size))
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(0.5)
    return fresh


def _learned(network: Network, inputs: Mapping[str, Input]) -> set[str]:
    if not network.learned_input:
        return set()
    return {n for n, each in inputs.items() if each.dims and each.tensor.is_floating_point()}


def _enlarge_a_gradient(net: nn.Module) -> None:
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    max(gradients, key=lambda gradient: float(gradient.abs().max())).mul_(1.001)


def _why(error: Exception) -> tuple[Literal["refused", "failed"], str]:
    broken = isinstance(error, TransportError | PlanMismatch | RemoteError)
    if isinstance(error, GpudistError | NotImplementedError) and not broken:
        return "refused", f"{type(error).__name__}: {error}"
    return "failed", "".join(traceback.format_exception(error))
