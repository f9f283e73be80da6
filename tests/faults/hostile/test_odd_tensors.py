"""Any kind of tensor gives the plain tensor's numbers, or an error of gpudist.

The cases follow from the public names: every tensor argument of every function and layer gets each
kind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten

import gpudist
from gpudist.errors import GpudistError
from gpudist.sbp import GlobalTensor
from gpudist.transport.loopback import LoopbackTransport, LoopbackWorld
from gpudist.world.partition import CartesianPartition, Partition
from tests.faults.hostile.test_wrong_types import (
    CALLABLES,
    NEEDS_MORE,
    Context,
    arguments_of,
    call,
    is_layer,
    parameters_of,
)
from tests.pool import distributed

# Kinds of tensor, each made of a plain one.
KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "fake": lambda x: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.reshape(x.shape[0], -1).to_sparse_csr(),
    "oneDNN": lambda x: x.float().to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.5, 0, torch.quint8),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "masked": lambda x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
    "negative": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "flipped": lambda x: x.numpy()[..., ::-1],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: torch.ones((), dtype=x.dtype).expand(x.shape),
    "of no cells": lambda x: x[:0],
    "of no dims": lambda x: x.new_ones(()),
    "of integers": lambda x: x.to(torch.int64),
    "of bools": lambda x: x.to(torch.bool),
    "of halves": lambda x: x.to(torch.float16),
    "a parameter": lambda x: torch.nn.Parameter(x),
    "a subclass": lambda x: x.as_subclass(Subclass),
}


class Subclass(torch.Tensor):
    """A user's own, which adds nothing."""


def plain(x: Any) -> torch.Tensor | None:
    """Return an ordinary tensor that equals ``x``, ``None`` if there is none."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x.copy())
    if type(x) is torch.nn.Parameter or type(x) is Subclass:
        return x.detach().as_subclass(torch.Tensor).clone().requires_grad_(x.requires_grad)
    if type(x) is not torch.Tensor or x.is_nested or x.device.type != "cpu":
        return None
    if x.layout is not torch.strided or x.is_quantized:
        return None
    if x.dtype in (torch.bool, torch.float8_e4m3fn):
        return x
    return torch.zeros_like(x) + x.resolve_conj().resolve_neg()


def takes_tensor(annotation: Any) -> bool:
    if get_origin(annotation) is Callable:
        return False
    kinds = (annotation, *get_args(annotation), *getattr(annotation, "__constraints__", ()))
    return torch.Tensor in kinds


def tensor_arguments(function: Callable[..., Any]) -> list[str]:
    return [name for name, (kind, _) in parameters_of(function).items() if takes_tensor(kind)]


# Layers are called; functions and operators are called with their arguments.
OF_FUNCTIONS = [
    (name, parameter)
    for name, thing in CALLABLES.items()
    if not is_layer(thing) and name not in NEEDS_MORE
    for parameter in tensor_arguments(thing)
]
OF_LAYERS = [
    (name, parameter)
    for name, thing in CALLABLES.items()
    if is_layer(thing)
    for parameter in tensor_arguments(thing.forward)
]


def outcome(context: Context, parameter: str, make: Callable[[torch.Tensor], Any]) -> Any:
    """Result of a call, or the error that it ends with."""
    torch.manual_seed(0)
    try:
        if not is_layer(CALLABLES[context.name]):
            given = arguments_of(context)
            given[parameter] = make(context.x.double())
            return call(context, given)
        layer = call(context, arguments_of(context)).double()
        taken = parameters_of(CALLABLES[context.name].forward)
        given = {name: context.x.double() for name, (_, required) in taken.items() if required}
        given[parameter] = make(context.x.double())
        return layer(**given)
    except Exception as error:
        return error


def complaint(
    x: torch.Tensor, odd: Any, found: Any, expect: Callable[[torch.Tensor], Any]
) -> str | None:
    """Describe what is wrong with the result ``found`` for ``odd``, which was made of ``x``.

    ``expect`` returns the result for a plain tensor.
    """
    if isinstance(found, GpudistError):
        return None
    equal = plain(odd)
    expected = expect(x.to(odd.dtype) if equal is None else equal)
    if isinstance(found, Exception) or isinstance(expected, Exception):
        if "not differentiable with respect to argument 'target'" in str(found):
            return None  # torch's own words, of any target that requires grad
        return f"{type(found).__name__}: {found!s:.200}, for {type(expected).__name__}"
    try:
        for mine, theirs in zip(_leaves(found), _leaves(expected), strict=True):
            _require_equal(mine, theirs)
    except AssertionError as error:
        return str(error)
    return None


def complaints(
    name: str, folder: Path, run: Callable[[Callable[[Partition], Any]], list[Any]], parameter: str
) -> list[str]:
    """Complaints about every kind, on every rank of the worlds in which ``run`` runs a body."""

    def outcomes(make: Callable[[torch.Tensor], Any]) -> list[Any]:
        return run(lambda P_world: outcome(Context(P_world, name, folder), parameter, make))

    said: list[str] = []
    x = Context(Partition(LoopbackTransport.single(), [0]), name, folder).x.double()
    for kind, make in KINDS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds that torch calls experimental
            try:
                odd = make(x)
            except (RuntimeError, TypeError):
                continue  # torch has no such tensor
            for rank, found in enumerate(outcomes(make)):
                wrong = complaint(
                    x, odd, found, lambda equal, rank=rank: outcomes(lambda _: equal)[rank]
                )
                said += [f"{kind}: {wrong}"] if wrong is not None else []
    return said


def _leaves(result: Any) -> list[Any]:
    return tree_flatten(result)[0]


def _require_equal(found: Any, expected: Any) -> None:
    if isinstance(found, GlobalTensor):
        found, expected = found.to_local(), expected.to_local()
    if not isinstance(found, torch.Tensor | np.ndarray):
        assert found == expected
        return
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    if isinstance(found, FakeTensor) or found.is_meta:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        return
    cells = [x.detach().as_subclass(torch.Tensor) for x in (found, expected)]
    torch.testing.assert_close(*cells, rtol=0, atol=0, equal_nan=True)


def on_one(body: Callable[[Partition], Any]) -> list[Any]:
    return [body(Partition(LoopbackTransport.single(), [0]))]


def on_two(body: Callable[[Partition], Any]) -> list[Any]:
    """Run in a separate world, since an error may end it."""
    return LoopbackWorld(2, 5.0).run(lambda wire: body(Partition(wire, range(2))))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("run", [on_one, on_two])
@pytest.mark.parametrize(("name", "parameter"), OF_FUNCTIONS + OF_LAYERS)
def test_tensors(name: str, parameter: str, run: Callable[..., list[Any]], tmp_path: Path) -> None:
    said = complaints(name, tmp_path, run, parameter)
    assert not said, "\n".join(said)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@distributed(ranks=2, transports=("host", "gloo", "nccl"))
def test_processes_survive(P_world: Partition, kind: str, is_first: bool) -> None:
    """No process dies at the first call of an operator, nor once it knows the shape."""
    P = P_world.create_cartesian_topology_partition([P_world.size, 1])
    x = torch.ones(2, 3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = KINDS[kind](x)
    if not is_first:
        _exchanged(x, P)
    found = _exchanged(odd, P)
    equal = plain(odd)
    if equal is None:
        assert isinstance(found, FakeTensor if kind == "fake" else GpudistError)
    elif not isinstance(found, GpudistError):
        _require_equal(found, _exchanged(equal, P))
    else:
        assert kind in ("float8", "of no cells", "of no dims")


def _exchanged(x: Any, P: CartesianPartition) -> Any:
    try:
        return gpudist.halo_exchange(x, P, halo=((1, 1), (0, 0)))
    except GpudistError as error:
        return error
