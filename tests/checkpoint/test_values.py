"""Values beside tensors: each comes back exactly, from files and full dicts, or is refused."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from gpudist import checkpoint
from gpudist.errors import CheckpointError
from gpudist.nn import ColumnParallelLinear
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.checkpoint.one_rank import P_WORLD, Extra, Holder, Keeper, same

Pair = namedtuple("Pair", "a b")
Level = IntEnum("Level", {"LOW": 1})
loop: list[Any] = []
loop.append(loop)

KEPT: dict[str, Any] = {
    "numbers": (True, 0, -(2**70), 0.1, -0.0, float("inf"), float("nan"), 1 + 2j),
    "texts": ["", "é\n\0", "x" * 5000, b"\0\xff", None],
    "empty": ([], {}, (), set(), OrderedDict(), torch.Size()),
    "empty list": [],
    "empty dict": {},
    "list of empty": [[], {}],
    "dict": {"warm": 10, "deep": {"er": [1, {"x": 2.5}]}},
    "dict with a point": {"a.b": {"c": 1}, "a": 2},
    "keys": {1: "a", (2, "x"): {None: 3.0}, False: 4},
    "ordered": OrderedDict(b=1, a={"x": OrderedDict()}),
    "set": {1, 2, "x"},
    "torch": (torch.float8_e5m2, torch.device("cuda:1"), torch.Size([2, 3])),
    "cell": torch.tensor(2**62 + 1),
    "cells": [torch.tensor(0.5, dtype=torch.bfloat16), {"x": torch.tensor([1 + 2j])}],
    "tuple of cells": (torch.tensor(float("nan")), [torch.tensor(True)]),
}
AS_PYTHON: list[tuple[Any, Any]] = [
    (np.float64(0.1), 0.1),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.int64(-3), -3),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.complex64(1 + 2j), 1 + 2j),
    ([np.float64(0.9), {"x": np.int8(1)}], [0.9, {"x": 1}]),
]
REFUSED: dict[str, Any] = {
    "function": print,
    "object": {"a": [object()]},
    "longdouble": np.longdouble(1) / 3,
    "array": np.ones(2),
    "named tuple": Pair(1, 2),
    "enumeration": Level.LOW,
    "defaultdict": defaultdict(int),
    "frozenset": frozenset({1}),
    "itself": loop,
    "module": torch.nn.Linear(1, 1),
    "sparse": torch.eye(2).to_sparse(),
    "long": 10**5000,
}
# Values that torch's own writer or reader would refuse with weights_only=True.
UNREADABLE: dict[str, Any] = {"no bytes": b""}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("dcp", "sequential", "optimizer"):
        monkeypatch.setattr(f"gpudist.checkpoint.{room}.world_of", lambda module: P_WORLD)


def modules(value: Any) -> tuple[Extra, Keeper, Extra, Keeper]:
    """Return a module and optimizer with ``value`` at every place, and others to fill."""
    first, second = Extra(value), Extra(None)
    state = {"m": torch.ones(2, 3), "value": value, "d": {"v": value}}
    return (
        first, Keeper(first, state, option=value, options=[1, {"v": value}]),
        second, Keeper(second, None, option=0, options=0),
    )  # fmt: skip


def assert_filled(module: Extra, optimizer: Keeper, value: Any) -> None:
    (state,), (group,) = optimizer.state.values(), optimizer.param_groups
    found = (module.extra, state["value"], state["d"], group["option"], group["options"])
    expected = (value, value, {"v": value}, value, [1, {"v": value}])
    for actual, wanted in zip(found, expected, strict=True):
        assert same(actual, wanted), (actual, wanted)
    assert torch.equal(state["m"], torch.ones(2, 3))


CASES = [(value, value) for value in KEPT.values()] + AS_PYTHON


@pytest.mark.parametrize(("value", "expected"), CASES, ids=[*KEPT, *(str(a) for a, _ in AS_PYTHON)])
def test_value_comes_back(tmp_path: Path, value: Any, expected: Any) -> None:
    first, optimizer, second, other = modules(value)
    checkpoint.save(first, tmp_path / "a", optimizer)
    checkpoint.load(second, tmp_path / "a", other)
    assert_filled(second, other, expected)
    # A loaded value is stored again in the same way.
    checkpoint.save(second, tmp_path / "b", other)
    _, _, third, last = modules(None)
    third.extra = None
    checkpoint.load(third, tmp_path / "b", last)
    assert_filled(third, last, expected)
    first, optimizer, second, other = modules(value)
    checkpoint.load_full_state_dict(second, checkpoint.full_state_dict(first))
    full = checkpoint.full_optimizer_state_dict(first, optimizer)
    checkpoint.load_full_optimizer_state_dict(second, other, full)
    assert_filled(second, other, expected)


@pytest.mark.parametrize("place", ["option", "state", "extra"])
@pytest.mark.parametrize("name", [*REFUSED, *UNREADABLE])
def test_value_is_refused_before_the_previous_checkpoint_goes(
    tmp_path: Path, name: str, place: str
) -> None:
    value = (REFUSED | UNREADABLE)[name]
    module = Extra({"x": 1})
    checkpoint.save(module, tmp_path / "a", Keeper(module))
    module.extra = {"x": value if place == "extra" else 1}
    options, state = {"o": [value] if place == "option" else 1}, {"s": value}
    optimizer = Keeper(module, state if place == "state" else None, **options)
    words = r"param_groups\[0\]\['o'\]\[0\]|s of weight|_extra_state\['x'\]"
    with pytest.raises(CheckpointError, match=words if name in REFUSED else None):
        checkpoint.save(module, tmp_path / "a", optimizer)
    assert os.listdir(tmp_path) == ["a"]
    other = Extra()
    checkpoint.load(other, tmp_path / "a", Keeper(other))
    assert other.extra == {"x": 1}


def with_hook(change: Any) -> torch.nn.Module:
    module = Holder()
    module.register_state_dict_post_hook(lambda _, state, prefix, about: change(state))
    return module


class GetsOnly(Holder):
    get_extra_state = Extra.get_extra_state


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Holder(x=torch.ones(1).expand(4)), r"x of shape \[4\] has strides \[0\].* clone\(\)"),
        (Holder(x=torch.arange(5.0).as_strided((3, 3), (1, 1))), "cells share memory"),
        (GetsOnly(3), "_extra_state cannot be loaded: GetsOnly has no set_extra_state"),
        (with_hook(lambda state: state.update(n=3)), "n is a int that load cannot set"),
        (with_hook(lambda state: state.update(weight=state["weight"] + 1)), "weight is a copy"),
    ],
)
def test_entry_that_load_cannot_set_is_refused(
    tmp_path: Path, module: torch.nn.Module, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(module, tmp_path / "a")
    checkpoint.save(Holder(x=torch.ones(4)) if hasattr(module, "x") else Holder(), tmp_path / "a")
    for load in (checkpoint.load, checkpoint.load_full_state_dict):
        given = tmp_path / "a" if load is checkpoint.load else module.state_dict()
        with pytest.raises(CheckpointError, match=words):
            load(module, given)  # pyright: ignore


def test_state_that_belongs_to_no_parameter_is_refused(tmp_path: Path) -> None:
    module = Holder()
    optimizer = Keeper(module)
    optimizer.state["count"] = {"n": 1}  # pyright: ignore
    with pytest.raises(CheckpointError, match="state of 'count', which is in none of its groups"):
        checkpoint.save(module, tmp_path / "a", optimizer)
    optimizer = Keeper(module)
    optimizer.register_state_dict_post_hook(lambda _, state: state.update(more=1))
    for save in (
        lambda: checkpoint.save(module, tmp_path / "a", optimizer),
        lambda: checkpoint.full_optimizer_state_dict(module, optimizer),
    ):
        with pytest.raises(CheckpointError, match=r"state dict has \['more'\] beside 'state'"):
            save()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_keeps_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Torch converts state to the dtype of its parameter, and texts to generators."""
    state = {
        "m": torch.full((2, 3), 1 + 2**-20), "n": torch.full((2, 3), 7, dtype=torch.uint8),
        "c": torch.full((2, 3), 1 + 2j), "product": torch.tensor(0.9), "step": torch.tensor(3.0),
        "text": "abc",
    }  # fmt: skip
    first, second = Holder().to(dtype), Holder().to(dtype)
    optimizer, other = Keeper(first, state), Keeper(second)
    checkpoint.save(first, tmp_path / "a", optimizer)
    checkpoint.load(second, tmp_path / "a", other)
    assert same(dict(other.state[second.weight]), state)
    full = checkpoint.full_optimizer_state_dict(first, optimizer)
    checkpoint.load_full_optimizer_state_dict(second, other, full)
    # A sequential state dict does not tell the dtype that its parameters had.
    assert same(dict(other.state[second.weight]), state | {"m": state["m"].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex128])
def test_every_dtype_has_a_full_dict(dtype: torch.dtype) -> None:
    value = torch.arange(32, dtype=torch.uint8).view(dtype)
    other = Holder(x=torch.zeros_like(value))
    checkpoint.load_full_state_dict(other, checkpoint.full_state_dict(Holder(x=value)))
    assert same(other.x, value)


def test_plain_torch_reads_nested_options(tmp_path: Path) -> None:
    module = Extra({"n": 42})
    options: Any = {"schedule": {"warm": 10, "steps": [{"a": 1}]}}
    checkpoint.save(module, tmp_path / "a", Keeper(module, {"d": {"x": 1.5}}, **options))
    state: Any = {
        "model": {"weight": torch.zeros(2, 3), "_extra_state": {"n": 0}},
        "optimizer": {
            "state": {"weight": {"d": {"x": 0.0}}},
            "param_groups": [{"lr": 0.0, "schedule": {"warm": 0, "steps": [{"a": 0}]}}],
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "a")
    assert state["model"]["_extra_state"] == {"n": 42}
    assert torch.equal(state["model"]["weight"], module.weight)
    assert state["optimizer"]["param_groups"] == [{"lr": 0.1, **options}]
    assert state["optimizer"]["state"] == {"weight": {"d": {"x": 1.5}}}


def save_with(P_world: Partition, path: Path, odd: int) -> None:
    """Rank 1 alone has something else."""
    is_odd = P_world.rank == 1
    module: Any = Extra({"n": 3 if is_odd and odd == 0 else 2})
    module.layer = ColumnParallelLinear(P_world, 4, 4)
    checkpoint.save(module, path, Keeper(module, option=print if is_odd and odd == 1 else 1))


def test_ranks_refuse_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    words = r"rank 1: param_groups\[0\]\['option'\] is a <class"
    for odd, expected in enumerate(["extra state .get_extra_state. of rank 1 differ", words]):
        with pytest.raises(CheckpointError, match=expected):
            run_distributed(save_with, 2, tmp_path / "a", odd)
