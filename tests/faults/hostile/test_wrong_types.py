"""An argument of any type is accepted as annotated, or named by an error.

The cases follow from signatures. A new public name needs a line in ``GOOD`` if its arguments differ
from all others.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import pytest
import torch

import gpudist
from gpudist import checkpoint, nn, planning, sbp
from gpudist.errors import GpudistError, ShapeError
from gpudist.planning.clock import Phase
from gpudist.transport.loopback import LoopbackTransport, LoopbackWorld
from gpudist.world.partition import CartesianPartition, Partition

ROOMS = (
    "gpudist", "gpudist.nn", "gpudist.nn.utils", "gpudist.ops", "gpudist.amp", "gpudist.data",
    "gpudist.sbp", "gpudist.checkpoint", "gpudist.planning", "gpudist.profiling", "gpudist.testing",
)  # fmt: skip
WITH_METHODS = (Partition, CartesianPartition, sbp.GlobalTensor)
METHODS = {kind.__name__ for kind in WITH_METHODS}
# Users make partitions by methods of others.
NOT_CALLED_BY_USERS = {"Partition", "CartesianPartition"}
# Right calls need more than a world: process groups of torch, another package, or a GPU.
NEEDS_MORE = {
    "from_dtensor", "to_dtensor", "to_typed_local", "CartesianPartition.create_device_mesh",
    "install_methods", "plan_of", "search",
}  # fmt: skip

_CELLS = {"1d": 3, "2d": 4, "3d": 5}


class Context:
    """Place of a call and its data: makes the right arguments of the call."""

    def __init__(self, P_world: Partition, name: str, folder: Path) -> None:
        self.P_world, self.name, self.folder = P_world, name, folder

    @property
    def dims(self) -> int:
        if self.name == "DistributedCosineEmbeddingLoss":
            return 2
        if self.name in ("DistributedMultiheadAttention", "DistributedEmbedding"):
            return 3
        return next((dims for end, dims in _CELLS.items() if end in self.name), 4)

    @property
    def P(self) -> CartesianPartition:
        shape = [self.P_world.size] + [1] * (self.dims - 1)
        return self.P_world.create_cartesian_topology_partition(shape)

    @property
    def x(self) -> torch.Tensor:
        return torch.ones([2] * self.dims)

    @cached_property
    def module(self) -> torch.nn.Module:
        return nn.DistributedLinear(self.P, 4, 4)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.module.parameters(), 0.1)

    @property
    def placement(self) -> sbp.Placement:
        return sbp.Placement.of(self.P)

    @property
    def global_tensor(self) -> sbp.GlobalTensor:
        return sbp.to_global(self.x, self.placement, [sbp.broadcast] * self.dims)

    @property
    def path(self) -> str:
        return f"{self.folder}/file"

    @property
    def saved(self) -> str:
        checkpoint.save(self.module, self.path)
        return self.path

    @property
    def advice(self) -> list[planning.Advice]:
        return [planning.Advice((1,), self.rehearsal, (self.rehearsal,), True, 1, 1.0, None)]

    @property
    def rehearsal(self) -> planning.Rehearsal:
        return planning.Rehearsal(0, Phase(), Phase(), planning.Memory(1, 1, 1))


def identity(x: torch.Tensor) -> torch.Tensor:
    return x * 1


def nothing(P_world: Partition) -> None:
    pass


GOOD: dict[Any, Callable[[Context], Any]] = {
    # By the name of a parameter, or of a callable and a parameter.
    **dict.fromkeys(("P", "P_x", "P_y", "other"), lambda c: c.P),
    **dict.fromkeys(("x", "a", "b", "query", "key"), lambda c: c.x),
    **dict.fromkeys(("to_dtensor.x", "to_typed_local.x"), lambda c: c.global_tensor),
    "value": lambda c: 2.0 if "Pad" in c.name else c.x,
    "Profile.network": lambda c: planning.Link(1.0, 1.0, 1.0),
    **dict.fromkeys(("dim", "rank", "world_rank"), lambda c: 0),
    **dict.fromkeys(("axes", "misfits"), lambda c: [0]),
    "network": lambda c: torch.nn.Linear(4, 4),
    "distribute.network": lambda c: torch.nn.ReLU(),
    "compiled.network": lambda c: gpudist.distribute(torch.nn.ReLU(), c.P),
    **dict.fromkeys(("operator", "step"), lambda c: identity),
    "fn": lambda c: nothing,
    "HaloRegion.layers": lambda c: [nn.DistributedConv2d(c.P, 2, 2, 3)],
    "load.path": lambda c: c.saved,
    "to_global.x": lambda c: c.global_tensor,
    **dict.fromkeys(("batch_size", "length"), lambda c: 4),
    "P_world": lambda c: c.P_world,
    "advice": lambda c: c.advice,
    "args": lambda c: (c.global_tensor,),
    "batch": lambda c: {"x": torch.ones(2)},
    "dataset": lambda c: [torch.ones(2)] * 4,
    "data": lambda c: [1],
    "distributed": lambda c: gpudist.distribute(torch.nn.ReLU(), c.P),
    "fits": lambda c: True,
    "global_shape": lambda c: [4, 4],
    **dict.fromkeys(("grid", "RandomCrops.size"), lambda c: (1,)),
    "kind": lambda c: "broadcast",
    "kwargs": lambda c: {},
    "layer": lambda c: nn.DistributedSoftmax(c.P, 1),
    "loader": lambda c: [torch.ones(2)],
    **dict.fromkeys(("carried_state.a", "carried_state.h"), lambda c: c.x[:, :1]),
    "causal_conv1d.weight": lambda c: torch.ones(2, 3),
    "causal_conv1d.bias": lambda c: torch.ones(2),
    "local": lambda c: c.global_tensor.to_local(),
    "mesh": lambda c: SimpleNamespace(mesh=torch.arange(c.P_world.size)),
    "module": lambda c: c.module,
    "optimizer": lambda c: c.optimizer,
    "path": lambda c: c.path,
    "planned": lambda c: nothing,
    "rehearsed": lambda c: (c.rehearsal,),
    "Fit.ranks": lambda c: 1,
    "found": lambda c: [planning.Fit(1, (1,), c.rehearsal.memory, True, True)],
    "remain": lambda c: [True] * c.dims,
    "rows": lambda c: [],
    "shape": lambda c: c.P.shape,
    "steps": lambda c: [1] * c.dims,
    "state_dict": lambda c: torch.nn.Linear(4, 4).state_dict(),
    "wire": lambda c: "host",
    "load_full_optimizer_state_dict.state_dict": lambda c: c.optimizer.state_dict(),
    "Memory.optimizer": lambda c: 1,
    "Placement.ranks": lambda c: list(range(c.P_world.size)),
    "Placement.type": lambda c: "cpu",
    "ranks": lambda c: [0],
    "plan.ranks": lambda c: 1,
    "profile_of.name": lambda c: "h100",
    "Stat.operator": lambda c: "broadcast",
    # By an annotation.
    int: lambda c: 2,
    float: lambda c: 2.0,
    str: lambda c: "text",
    bool: lambda c: True,
    object: lambda c: "text",
    Phase: lambda c: Phase(),
    planning.Link: lambda c: planning.Link(1.0, 1.0, 1.0),
    planning.Memory: lambda c: planning.Memory(1, 1, 1),
    planning.Profile: lambda c: planning.profile_of("h100"),
    planning.Rehearsal: lambda c: c.rehearsal,
    sbp.GlobalTensor: lambda c: c.global_tensor,
    int | Sequence[int]: lambda c: 2,
    int | Sequence[int | None]: lambda c: 1,
}
# Requirements of calls beyond their signatures: a parameter, its value and the callables.
NEEDED: dict[str, tuple[Any, set[str]]] = {
    "axes": ([1], {"AllGather", "SumScatter", "all_gather", "sum_scatter"}),
    "axes_reduce": ([1], {"AllSumReduce", "all_sum_reduce"}),
    "halo": ([(1, 1)], {"HaloExchange", "halo_exchange", "draw"}),
    "size": (
        4,
        {
            "DistributedUpsample",
            "DistributedUpsamplingNearest2d",
            "DistributedUpsamplingBilinear2d",
        },
    ),
    "dim": (1, {"DistributedSoftmax", "DistributedLogSoftmax", "DistributedSoftmin"}),
}


def is_made_by_users(thing: object) -> bool:
    return (
        inspect.isclass(thing)
        and inspect.isfunction(thing.__init__)
        and not issubclass(thing, BaseException)
        and not getattr(thing, "_is_protocol", False)
    )


def public() -> dict[str, Callable[..., Any]]:
    """Return the public callables by a unique name."""
    found: dict[str, Callable[..., Any]] = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        names = getattr(module, "__all__", None) or [
            name for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", "") == room
        ]  # fmt: skip
        for name in names:
            thing = getattr(module, name)
            if inspect.isfunction(thing) or is_made_by_users(thing):
                short = thing.__name__
                known = found.setdefault(short, thing)
                if known is not thing:
                    found[f"{room}.{short}"] = thing
    for kind in WITH_METHODS:
        # Methods of torch's tensors raise its errors.
        torchs = dir(torch.Tensor) if issubclass(kind, torch.Tensor) else []
        for name, method in vars(kind).items():
            if not name.startswith("_") and name not in torchs and inspect.isfunction(method):
                found[f"{kind.__name__}.{name}"] = method
    return found


def parameters_of(function: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Annotation of each parameter, and whether it must be given."""
    plain = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    found: dict[str, tuple[Any, bool]] = {}
    for parameter in inspect.signature(plain).parameters.values():
        annotation, name = parameter.annotation, parameter.name
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, plain.__globals__)
            except NameError:
                annotation = object()  # of a library that is imported later
        found[name] = annotation, parameter.default is parameter.empty
    return found


CANDIDATES: dict[str, Any] = {
    "an object": object(),
    "a string": "wrong",
    "a number": 1.5,
    "None": None,
    "a list": [object()],
    "a dict": {"wrong": 1},
    "an array": np.ones(2),
}
# Candidates that a class admits.
RIGHT: dict[Any, set[str]] = {
    Any: set(CANDIDATES), inspect.Parameter.empty: set(CANDIDATES), object: set(CANDIDATES),
    NoneType: {"None"}, str: {"a string"}, float: {"a number"}, dict: {"a dict"},
    Mapping: {"a dict"}, np.ndarray: {"an array"},
}  # fmt: skip


def right_of(annotation: Any) -> set[str]:
    """Return the candidates that an annotation admits."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, TypeVar):
        return set().union(*map(right_of, annotation.__constraints__))
    if origin in (Union, UnionType):
        return set().union(*map(right_of, parts))
    if origin in (Sequence, tuple):
        listed = {"a list": "an object", "an array": "a number"}
        return {one for one, part in listed.items() if part in right_of(parts[0])}
    if origin is not None and origin.__name__ == "Iterable":
        return {"a string", "a list", "a dict", "an array"}
    return RIGHT.get(origin if origin is not None and origin is not Literal else annotation, set())


CALLABLES = {name: thing for name, thing in public().items() if name not in NOT_CALLED_BY_USERS}


def room_of(name: str) -> str:
    return CALLABLES[name].__module__.split(".")[1]


def arguments_of(context: Context) -> dict[str, Any]:
    """A right value of each parameter that needs one."""
    name = context.name
    given = {parameter: value for parameter, (value, names) in NEEDED.items() if name in names}
    for parameter, (annotation, required) in parameters_of(CALLABLES[name]).items():
        if required:
            make = GOOD.get(f"{name}.{parameter}") or GOOD.get(parameter) or GOOD.get(annotation)
            assert make is not None, f"add a line to GOOD: {name}, {parameter}: {annotation}"
            given[parameter] = make(context)
    return given


def call(context: Context, given: dict[str, Any]) -> Any:
    """Call a callable of any kind on these arguments."""
    kind, _, method = context.name.rpartition(".")
    if kind in METHODS:
        owner = context.global_tensor if kind == "GlobalTensor" else context.P
        return getattr(owner, method)(**given)
    return CALLABLES[context.name](**given)


def complaint(context: Context, parameter: str, value: Any) -> str | None:
    """Describe what is wrong with the error for a wrong argument."""
    given = {**arguments_of(context), parameter: value}
    try:
        call(context, given)
    except GpudistError as error:
        # The functions of operators call a tensor or array "the input".
        words = "x|the input" if parameter == "x" else parameter
        return (
            None
            if re.search(rf"\b({words})\b", str(error))
            else f"the error does not name it: {error}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def wrong_values(name: str) -> Iterator[tuple[str, str]]:
    """Parameters and names of candidates that they do not admit."""
    for parameter, (annotation, _) in parameters_of(CALLABLES[name]).items():
        for wrong in sorted(CANDIDATES.keys() - right_of(annotation)):
            yield parameter, wrong


def refusals(name: str, folder: Path) -> Iterator[str]:
    """Complaints about a callable: what is right is taken, what is wrong raises on all ranks."""

    def alone() -> Context:
        return Context(Partition(LoopbackTransport.single(), [0]), name, folder)

    if name not in NEEDS_MORE:
        context = alone()
        call(context, arguments_of(context))
    first: dict[str, Any] = {}
    for parameter, wrong in wrong_values(name):
        value = first.setdefault(parameter, CANDIDATES[wrong])
        said = complaint(alone(), parameter, CANDIDATES[wrong])
        if said is None and value is CANDIDATES[wrong]:
            # Two ranks pass the same wrong value, once per parameter.
            ranks = LoopbackWorld(2, 5.0).run(
                lambda wire, parameter=parameter, value=value: complaint(
                    Context(Partition(wire, range(2)), name, folder), parameter, value
                )
            )
            said = next((each for each in ranks if each is not None), None)
        if said is not None:
            yield f"{name}, {parameter} is {wrong}: {said}"
    if not is_layer(CALLABLES[name]):
        return
    taken = parameters_of(CALLABLES[name].forward)
    for parameter, (annotation, _) in taken.items():
        for wrong in sorted(CANDIDATES.keys() - right_of(annotation)):
            context = alone()
            layer = call(context, arguments_of(context))
            given = {key: context.x for key, (_, required) in taken.items() if required}
            is_tensor = wrong == "an array" and annotation is torch.Tensor
            try:
                layer(**{**given, parameter: CANDIDATES[wrong]})
                said = "accepted"
            except ShapeError as error:
                words = [parameter, "torch.from_numpy"] if is_tensor else [parameter]
                said = None if all(word in str(error) for word in words) else str(error)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said is not None:
                yield f"{name}, input {parameter} is {wrong}: {said}"


def is_layer(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, torch.nn.Module)


@pytest.mark.parametrize("room", sorted({room_of(name) for name in CALLABLES}))
def test_room(room: str, tmp_path: Path) -> None:
    names = [name for name in CALLABLES if room_of(name) == room]
    complaints = [each for name in names for each in refusals(name, tmp_path)]
    assert not complaints, "\n".join(complaints)


def test_what_is_left_out_exists() -> None:
    assert public().keys() >= NOT_CALLED_BY_USERS | NEEDS_MORE
