"""Public names: imported when used, each in one place, and known to whoever asks for another."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import gpudist
from gpudist import nn, ops, sbp
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition
from tests.pool import distributed

ROOT = Path(__file__).resolve().parents[1]
PACKAGE: Any = gpudist
ROOMS: list[Any] = [
    PACKAGE, nn, ops, sbp, gpudist.amp, gpudist.data, gpudist.checkpoint, gpudist.testing,
]  # fmt: skip

PROGRAM = """
import pickle, sys
import gpudist
import gpudist.errors
from gpudist import errors
assert not hasattr(gpudist, "__wrapped__") and not {"torch", "numpy"} & sys.modules.keys()
import gpudist.nn
assert gpudist.nn.DistributedConv2d.__name__ == "DistributedConv2d"
assert "gpudist.convert" not in sys.modules
assert gpudist.distribute and gpudist.plan_of and gpudist.checkpoint
later = "gpudist.planning", "gpudist.pictures"
assert not [name for name in sys.modules if name.startswith(later)]
assert gpudist.draw.__module__ == "gpudist.pictures.draw"
import torch
spec = pickle.loads(STORED)
assert repr(spec) == "split(1)"
assert gpudist.sbp.split(1) == spec and "distribute" in dir(gpudist)
everything = {}
exec("from gpudist import *", everything)
assert everything["distribute"] is gpudist.distribute
assert "halo_exchange" in vars(gpudist) and gpudist.planning.plan
"""


def test_names_are_imported_when_used() -> None:
    program = PROGRAM.replace("STORED", repr(pickle.dumps(sbp.split(1))))
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    assert ended.returncode == 0, ended.stderr


def exchanged(x: torch.Tensor, P_x: gpudist.CartesianPartition) -> torch.Tensor:
    return gpudist.halo_exchange(x, P_x, halo=[(1, 1)])


@distributed(ranks=1, transports=("loopback",))
def test_compiled_code_reads_names_that_are_not_imported_yet(P_world: Any) -> None:
    P_x, x = P_world.grid(1, 1), torch.ones(2, 3)
    expected = exchanged(x, P_x)
    PACKAGE.__dict__.pop("halo_exchange")
    for _ in range(2):
        found = torch.compile(exchanged, backend="eager", fullgraph=True)(x, P_x)
        torch.testing.assert_close(found, expected)


def test_public_names_alone_are_shown() -> None:
    rooms = {"checkpoint", "planning", "testing", "__version__"}
    assert set(dir(gpudist)) == {*PACKAGE.__all__, *rooms}
    assert dir(nn) == sorted(nn.__all__) and dir(ops) == sorted(ops.__all__)
    of_others = {"Any", "NoReturn", "TYPE_CHECKING", "torch", "typing"}
    assert not of_others & {*dir(gpudist), *dir(nn), *dir(ops)}
    for name in dir(gpudist):
        assert getattr(gpudist, name) is not None


def test_a_name_lives_in_one_place() -> None:
    homes: dict[int, list[str]] = {}
    for room in ROOMS:
        for name in room.__all__:
            homes.setdefault(id(getattr(room, name)), []).append(f"{room.__name__}.{name}")
    twice = [places for places in homes.values() if len(places) > 1]
    # OneFlow's word for the function that makes one.
    assert twice == [["gpudist.placement", "gpudist.sbp.Placement"]]


@distributed(ranks=1, transports=("loopback",))
def test_a_partition_shows_what_users_call(P_world: Any) -> None:
    P_x = P_world.grid(1, 1)
    shown = {name for name in dir(P_x) if not name.startswith("_")}
    assert {"grid", "rank", "size", "shape", "along", "world", "create_device_mesh"} <= shown
    internal = {"wire", "digest", "plan_rank", "communicator", "check_axes"}
    assert not shown & internal and all(hasattr(P_x, name) for name in internal)


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        ("gpudist", "all_reduce", "use gpudist.all_sum_reduce"),
        ("gpudist", "AllReduce", "use gpudist.nn.AllSumReduce"),
        ("gpudist.ops", "all_reduce", "use gpudist.all_sum_reduce"),
        ("gpudist", "reduce_scatter_tensor", "use gpudist.sum_scatter"),
        ("gpudist", "init_process_group", "use gpudist.init"),
        ("gpudist", "DTensor", "use gpudist.GlobalTensor"),
        ("gpudist.sbp", "Shard", "use gpudist.sbp.split"),
        ("gpudist.sbp", "Replicate", "use gpudist.sbp.broadcast"),
        ("gpudist", "init_device_mesh", "use gpudist.init().grid"),
        ("gpudist", "GradScaler", "use gpudist.amp.GradScaler"),
        ("gpudist", "load", "use gpudist.checkpoint.load"),
        ("gpudist", "Conv2d", "use gpudist.nn.DistributedConv2d"),
        ("gpudist.nn", "Conv2d", "use gpudist.nn.DistributedConv2d"),
        ("gpudist.nn", "affine_scan", "use gpudist.affine_scan"),
        ("gpudist.nn", "functional", "use torch.nn.functional, which takes global tensors"),
        ("gpudist.nn", "DistributedConv4d", "did you mean gpudist.nn.DistributedConv3d?"),
        ("gpudist", "distrbute", "did you mean gpudist.distribute?"),
        ("gpudist", "nothing", ""),
        ("gpudist", "a.b", ""),
    ],
)
def test_a_missing_name_is_answered_with_the_one_meant(module: str, name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as found:
        getattr(import_module(module), name)
    text = f"module {module!r} has no attribute {name!r}"
    assert str(found.value) == (f"{text}; {hint}" if hint else text)
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)


def test_partitions_name_the_function_that_takes_them() -> None:
    P_x: Any = Partition(LoopbackTransport.single(), [0])
    for name, use in (("scatter", "gpudist.scatter"), ("get_rank", "gpudist.init().rank")):
        with pytest.raises(AttributeError) as found:
            getattr(P_x, name)
        assert str(found.value) == f"'Partition' object has no attribute {name!r}; use {use}"
    assert not hasattr(P_x, "mesh_dim_names")


def test_words_of_others_lead_to_names_that_exist() -> None:
    from gpudist.checks.hints import WORDS, MissingName

    for word in WORDS:
        text = str(MissingName("gpudist", word))
        found: Any = gpudist
        home = text.partition("; use ")[2]
        if home.startswith("gpudist.") and "()" not in home:
            for part in home.split(".")[1:]:
                found = getattr(found, part)
        else:
            assert home, text
