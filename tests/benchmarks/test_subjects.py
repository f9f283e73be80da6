"""The subjects find results right, and wrong ones wrong; every operator and layer has a row."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks import attention, dispatch, fourier, layers, losses, operators, scaling, scan
from benchmarks.case import Case, Side
from benchmarks.training import Step
from gpudist import nn, ops
from gpudist.ops.operator import Operator
from gpudist.testing import run_distributed
from gpudist.transport.host.core_transport import is_built
from gpudist.world.partition import Partition
from tests.pool import distributed

FOLDER = Path(benchmarks.__file__).parent
# Layers of the GPT, of which tensor_parallel measures training steps.
OF_THE_GPT = (
    *("ParallelAttention", "VocabParallelEmbedding", "VocabParallelCrossEntropyLoss"),
    "ColumnParallelLinear",
)


def smaller(case: Case, **parameters: Any) -> Case:
    return replace(case, parameters={**case.parameters, **parameters})


def require_checked(sides: Mapping[str, Side]) -> None:
    """Each side is right; one that gives numbers is wrong where these are others."""
    for name, side in sides.items():
        result = side.call()
        assert side.is_right(result), name
        if isinstance(result, tuple):
            assert not side.is_right(tuple(2 * each + 1 for each in result)), name
        elif isinstance(result, torch.Tensor) and result.numel():
            assert not side.is_right(result + 1), name
        elif isinstance(result, Step):
            assert not side.is_right(replace(result, loss=2 * result.loss)), name


@distributed(ranks=[2], transports=["loopback"])
def test_losses(P_world: Partition) -> None:
    for case in losses.cases(P_world.size):
        shape = case.parameters["shape"]
        small = (2, 5, 8, 6) if len(shape) == 4 else (8, 6)
        sides = losses.sides(smaller(case, shape=small), P_world)
        assert list(sides) == ["gpudist", "local torch"]
        require_checked(sides)


@distributed(ranks=[2], transports=["loopback"])
def test_dispatch(P_world: Partition) -> None:
    for case in dispatch.cases(P_world.size):
        sides = dispatch.sides(case, P_world)
        assert list(sides) == ["gpudist", "local torch"]
        require_checked(sides)


@distributed(ranks=[2], transports=["loopback"])
def test_attention(P_world: Partition) -> None:
    for case in attention.cases(P_world.size):
        small = (8, 2, 16) if case.parameters["what"] == "multi-head layer" else (1, 2, 8, 4)
        require_checked(attention.sides(smaller(case, shape=small), P_world))


@distributed(ranks=[2], transports=["loopback"])
def test_scaling(P_world: Partition) -> None:
    for case in scaling.cases(P_world.size):
        shape = case.parameters["shape"]
        small = (*shape[:2], *[16] * (len(shape) - 2))
        sides = scaling.sides(smaller(case, shape=small), P_world)
        one = "1 rank" if case.name.startswith("strong") else "1 block alone"
        assert list(sides) == ["gpudist", one, "no communication"]
        if P_world.rank:
            assert sides[one].call() is None
        require_checked(sides)


def fourier_is_checked(P_world: Partition) -> None:
    for case in fourier.cases(P_world.size):
        dims = len(case.parameters["kept"])
        small = smaller(case, shape=(4, 4, *[16] * dims), kept=(8, 4, 2)[:dims])
        sides = fourier.sides(small, P_world)
        assert list(sides) == ["gpudist", "all-gather", "gloo all-gather", "dfno partitions"]
        require_checked(sides)


@pytest.mark.skipif(not is_built(), reason="the native core is not built")
@pytest.mark.parametrize("ranks", [2, 4])
def test_fourier(ranks: int) -> None:
    """The counted bytes of every side are those of the formula."""
    run_distributed(fourier_is_checked, ranks, transport="host", timeout=100)


@distributed(ranks=[2], transports=["host"])
def test_scan(P_world: Partition) -> None:
    for case in scan.cases(P_world.size):
        small = {name: (1, 8, 2, *case.parameters[name][3:]) for name in ("a", "b")}
        sides = scan.sides(smaller(case, **small), P_world)
        assert list(sides) == ["gpudist", "all-gather"]
        require_checked(sides)


def operators_are_checked(P_world: Partition) -> None:
    for case in operators.cases(P_world.size):
        if case.name.endswith("4 KiB"):
            sides = operators.sides(case, P_world)
            assert {"gpudist", "gloo", "memory copy"} <= set(sides)
            require_checked({name: side for name, side in sides.items() if name != "memory copy"})


@pytest.mark.skipif(not is_built(), reason="the native core is not built")
def test_operators() -> None:
    run_distributed(operators_are_checked, 2, transport="host", timeout=100)


def layer_classes() -> list[type]:
    found = [getattr(nn, name) for name in nn.__all__]
    modules = [each for each in found if inspect.isclass(each)]
    return [each for each in modules if not issubclass(each, Operator)]


def measured_layers() -> set[str]:
    names = {f"Distributed{case.parameters['layer']}" for case in layers.cases(2)}
    names |= {f"Distributed{name}" for name in losses.LOSSES}
    gpt = (FOLDER.parent / "examples" / "gpt.py").read_text()
    step = (FOLDER / "transformer.py").read_text()
    names |= {name for name in OF_THE_GPT if name in gpt or name in step}
    for subject in ("attention", "halo_region", "linear"):
        names |= {name for name in nn.__all__ if name in vars(_module(subject))}
    # For two of them, the functions are measured; the last is part of ParallelAttention.
    return names | {"RingAttention", "AllToAllAttention", "ParallelQKV"}


def _module(subject: str) -> Any:
    return importlib.import_module(f"benchmarks.{subject}")


def test_every_file_of_layers_has_a_row() -> None:
    measured = measured_layers()
    files = {each.__module__ for each in layer_classes() if each.__name__ in measured}
    missing = {each.__module__ for each in layer_classes()} - files
    assert missing == set()


def test_every_operator_has_a_row() -> None:
    names = [name for name in vars(ops) if inspect.isclass(getattr(ops, name))]
    names = [name for name in names if issubclass(getattr(ops, name), Operator)]
    subjects = [path.read_text() for path in FOLDER.glob("*.py")]
    assert len(names) >= 10
    for name in names:
        assert any(f"{name}(" in text for text in subjects), name


def test_every_operator_has_a_call_of_mpi() -> None:
    from benchmarks.peers import mpi

    assert list(mpi._OPERATORS) == list(operators.OPERATORS)
