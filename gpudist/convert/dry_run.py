"""Plan a network on a partition: run the forward of one rank without a world and without data."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpudist.checks.arguments import checked
from gpudist.checks.storage import on_meta
from gpudist.convert.converted import (
    Converted,
    conversion_of,
    names_of_entries,
    prepare,
    undo_conversion,
)
from gpudist.convert.inputs import Entrance, names_by_place, require_known
from gpudist.convert.known import KnownValues, know, know_copy, value_of
from gpudist.convert.network import Conversion, without_wait
from gpudist.convert.network_plan import NetworkPlan
from gpudist.convert.parameters import unlisted_leaves
from gpudist.convert.weights import copy_network
from gpudist.errors import ConversionError, GpudistError
from gpudist.geometry.blocks import Decomposition
from gpudist.sbp.call_cache import without_cache
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.scope import Record, Scope
from gpudist.transport.dry import META, DryTransport, Posting, Traffic, posting_of
from gpudist.world.partition import CartesianPartition, Partition

Shape = Sequence[int]


class _Counter:
    """Counter of the bytes that one rank sends."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def exchange(self, traffic: Traffic) -> None:
        self.sent_bytes += sum(message.size_bytes for message in traffic.sends)
        self.sent_bytes += sum(shared.size_bytes for shared in traffic.collectives)

    def start(self, traffic: Traffic) -> object:
        self.exchange(traffic)
        return None

    def wait(self, started: object) -> None:
        pass


@checked(ConversionError)
def plan_of(
    network: torch.nn.Module,
    P_x: CartesianPartition | DeviceMesh | Sequence[int],
    *shapes: Sequence[int] | torch.Tensor,
    ranks: Sequence[int] | int | None = None,
    plan: NetworkPlan | None = None,
    method: str = "forward",
    inputs: Mapping[str, str | Sequence[int]] | None = None,
    named: Mapping[str, Any] | None = None,
) -> NetworkPlan:
    """Return the plan of a network converted by :func:`distribute`, for inputs of these shapes.

    The forward of one rank runs with the real plans on tensors without data. This needs no world,
    copies no weights and allocates no memory.

    Args:
        network: network as for :func:`distribute`; not modified.
        P_x: partition, whose transport determines the messages to count; or torch's mesh, or the
            shape of a grid of any size, for messages over shared memory.
        shapes: global shapes of the inputs, in the order of the arguments. Pass a tensor instead if
            its dtype differs from the parameters' (a meta tensor will do) or if the forward reads
            its values.
        ranks: rank to plan, or several ranks, whose bytes are summed; by default the first rank.
        plan: edits to apply.
        method: method to call.
        inputs: kinds of inputs; see :func:`distribute`.
        named: further arguments by name: tensors of global shapes, or any other values.

    Returns:
        Rows in the order of the forward, with the bytes that the ranks send.

    Raises:
        ConversionError: the network cannot be called with these inputs, depends on values of
            tensors, or never reaches a layout of ``plan``.
    """
    grid = tuple(P_x.shape if isinstance(P_x, CartesianPartition | DeviceMesh) else P_x)
    if not shapes and not named:
        raise ConversionError(
            "plan_of needs the global shapes of the inputs: plan_of(network, P_x, (2, 3, 256, 256))"
        )
    chosen = [0] if ranks is None else [ranks] if isinstance(ranks, int) else list(ranks)
    wrong = [rank for rank in chosen if not 0 <= rank < prod(grid)]
    if wrong:
        raise ConversionError(
            f"plan_of: ranks {wrong} are not on a grid {list(grid)} of {prod(grid)} ranks; use 0 "
            f"to {prod(grid) - 1}"
        )
    posting = posting_of(P_x.transport) if isinstance(P_x, CartesianPartition) else "host"
    plans = [
        _plan_for_rank(
            network, grid, posting, shapes, rank, plan or NetworkPlan(), method, inputs or {}, named
        )
        for rank in chosen
    ]
    return functools.reduce(_add_sent_bytes, plans)


def _add_sent_bytes(a: NetworkPlan, b: NetworkPlan) -> NetworkPlan:
    rows = [
        row._replace(sent_bytes=row.sent_bytes + other.sent_bytes)
        for row, other in zip(a.rows, b.rows, strict=True)
    ]
    return replace(a, rows=rows)


def _plan_for_rank(
    network: nn.Module,
    grid: tuple[int, ...],
    posting: Posting,
    shapes: Sequence[Any],
    rank: int,
    plan: NetworkPlan,
    method: str,
    inputs: Mapping[str, Any],
    named: Mapping[str, Any] | None,
) -> NetworkPlan:
    counter = _Counter()
    wire = DryTransport(rank, prod(grid), counter, lambda shape, *_: tuple(shape), posting)
    P_x = Partition(wire, range(prod(grid))).create_cartesian_topology_partition(grid)
    require_known(inputs, *names_of_entries(network, [method]))
    whole = _wholes(network, shapes, named or {})
    values = KnownValues()
    converted, blocks, others = _convert_with_values(
        network, P_x, whole, plan, values, method, inputs
    )
    record = conversion_of(converted).scope.record = Record(lambda: counter.sent_bytes)
    try:
        with (
            without_cache(),
            values,
            torch.device(META),
            torch.no_grad(),
            _without_compiling(),
        ):
            call = converted if method == "forward" else getattr(converted, method)
            outputs = call(*blocks, **others)
    except GpudistError:
        raise
    # The user's network may raise any exception.
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if "meta tensor" in str(error):
            why = "it reads values of tensors, which exist only in a real run"
        raise ConversionError(
            f"plan_of: the network cannot be planned for these inputs: {_place_of(error)}{why}"
        ) from error
    return replace(plan, rows=record.rows, outputs=without_wait(outputs))


def _without_compiling() -> AbstractContextManager[object]:
    # Importing the compiler takes a second; as long as nobody has, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


class _DryConversion(Conversion):
    """Conversion for calls on tensors without data, with the values that are known."""

    def __init__(
        self,
        entrance: Entrance,
        values: KnownValues,
        known: Mapping[str, torch.Tensor],
        replicate_parameters: bool,
    ) -> None:
        super().__init__(entrance, "gather", None, replicate_parameters)
        self.has_agreed = True
        self.values, self.given = values, known

    def __call__(self, network: nn.Module, function: Any, args: Any, kwargs: Any) -> Any:
        @functools.wraps(function)
        def call_with_values(*args: Any, **kwargs: Any) -> Any:
            # Enter the mode again, so that it handles global tensors before the interception does.
            with self.values:
                return function(*args, **kwargs)

        return super().__call__(network, call_with_values, args, kwargs)

    def require_pins(self, scope: Scope) -> None:
        missed = [] if scope.pins is None else scope.pins.unreached(scope.calls)
        if missed:
            raise ConversionError(
                f"plan_of: layouts that are not used: {'; '.join(missed)}; the function column of "
                "a plan without them has the names"
            )

    def enter_arguments(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        entered, others = super().enter_arguments(function, args, kwargs)
        name_of = names_by_place(function)
        for name, x in [*((name_of(i), x) for i, x in enumerate(entered)), *others.items()]:
            if isinstance(x, GlobalTensor) and name in self.given:
                know(x, self.given[name])
        return entered, others


def _values_of(
    whole: tuple[list[Any], dict[str, Any]], name_of: Callable[[int], str]
) -> dict[str, torch.Tensor]:
    named = {**{name_of(i): x for i, x in enumerate(whole[0])}, **whole[1]}
    known = {name: value_of(x) for name, x in named.items()}
    return {name: value for name, value in known.items() if value is not None}


def _place_of(error: Exception) -> str:
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "gpudist"):
            place = f"{frame.f_code.co_filename}, line {line}: "
    return place


def convert_dry(
    network: nn.Module,
    P_x: CartesianPartition,
    inputs: Sequence[torch.Tensor],
    replicate_parameters: bool = True,
    plan: NetworkPlan | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """Convert a copy without data, without agreement among ranks.

    Args:
        network: network.
        P_x: partition of the first input.
        inputs: tensors with the global shapes of the inputs.
        replicate_parameters: see :func:`distribute`.
        plan: edits to apply.

    Returns:
        The converted network, and this rank's blocks of the inputs.
    """
    converted, blocks, _ = _convert_with_values(
        network,
        P_x,
        (list(inputs), {}),
        plan or NetworkPlan(),
        KnownValues(),
        replicate_parameters=replicate_parameters,
    )
    return converted, blocks


def _convert_with_values(
    network: nn.Module,
    P_x: CartesianPartition,
    whole: tuple[list[Any], dict[str, Any]],
    plan: NetworkPlan,
    values: KnownValues,
    method: str = "forward",
    inputs: Mapping[str, Any] | None = None,
    replicate_parameters: bool = True,
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Convert a copy without data for inputs ``whole``, and return it with their blocks."""
    kinds, name_of = dict(inputs or {}), names_by_place(getattr(network, method))
    blocks = [_block(name_of(i), x, P_x, kinds) for i, x in enumerate(whole[0])]
    named = {name: _block(name, x, P_x, kinds) for name, x in whole[1].items()}
    known, entrance = _values_of(whole, name_of), Entrance(P_x, kinds)
    conversion = _DryConversion(entrance, values, known, replicate_parameters)
    converted = without_cells(network)
    prepare(converted, conversion, [method], plan)()
    return converted, blocks, named


def _wholes(
    network: nn.Module, shapes: Sequence[Any], named: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    copies: dict[int, Any] = {}

    def whole(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return know_copy(torch.empty_like(x, device=META), x, copies)
        if isinstance(x, (tuple, list, torch.Size)) and all(hasattr(n, "__index__") for n in x):
            return on_meta("an input", x, dtype)
        return x

    return [whole(x) for x in shapes], {
        name: whole(x) if isinstance(x, torch.Tensor) else x for name, x in named.items()
    }


def _block(name: str, x: Any, P_x: CartesianPartition, kinds: dict[str, Any]) -> Any:
    """Return this rank's block of the global input ``x``."""
    if not isinstance(x, torch.Tensor):
        return x
    kind = kinds.get(name, "block" if x.dim() == P_x.dim else "whole")
    if kind in ("whole", "split"):
        return x
    kinds[name] = tuple(x.shape)
    assert P_x.index is not None
    block = Decomposition.balanced(tuple(x.shape), P_x.shape).block(P_x.index)
    return torch.empty(block.shape, dtype=x.dtype, device=META)


def without_cells(network: nn.Module) -> nn.Module:
    """Copy the sequential tree with parameters and buffers that have shapes but no data."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(_like(p), p.requires_grad) for p in network.parameters()
    }
    for x in unlisted_leaves(network).values():
        meta = torch.empty_like(x, device=META).requires_grad_()
        memo[id(x)] = nn.Parameter(meta) if isinstance(x, nn.Parameter) else meta
    copies: dict[int, Any] = {}
    memo |= {
        id(b): know_copy(torch.empty_like(b, device=META), b, copies) for b in network.buffers()
    }
    copy = copy_network(network, memo)
    return undo_conversion(copy) if isinstance(copy, Converted) else copy


def _like(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, GlobalTensor):
        return torch.empty(x.shape, dtype=x.dtype, device=META)
    return torch.empty_like(x, device=META)
