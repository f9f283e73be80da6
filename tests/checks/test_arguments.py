"""Values that an annotation accepts, and the error for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import gpudist
from gpudist import nn
from gpudist.checks.arguments import Checked, check, checked
from gpudist.errors import CheckpointError, GpudistError, PartitionError, ShapeError
from gpudist.geometry import HaloWidths, SlidingWindow
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition

RIGHT: list[tuple[Any, list[Any]]] = [
    (int, [1, np.int64(1), torch.tensor(1)]),
    (float, [1, 1.5, np.float32(1), np.int8(1), torch.tensor(1.5)]),
    (bool, [True, np.bool_(False)]),
    (Sequence[int], [[1], (), torch.Size([1]), np.array([1]), range(2), [np.int64(1)]]),
    (Sequence[tuple[int, int]], [[(1, 2)], [[1, 2]], np.array([[1, 2]])]),
    (int | Sequence[int], [1, [1, 2]]),
    (Literal["a", "b"] | None, ["a", "refused elsewhere", None]),
    (torch.device | str | None, [torch.device("cpu"), "cpu", 0, None]),
    (torch.dtype, [torch.float32]),
    (Sequence[torch.nn.Module], [torch.nn.ModuleList([torch.nn.ReLU()]), []]),
    (torch.Tensor, [torch.ones(1), torch.nn.Parameter(torch.ones(1))]),
    (Callable[..., Any], [print, lambda: None]),
    (Mapping[str, Any], [{}]),
    (Iterable[int], [[1], {1}, iter([])]),
    (str | Path, ["a", Path("a")]),
    (Any, [object()]),
]
WRONG: list[tuple[Any, Any, str]] = [
    (int, 1.0, "argument is 1.0 (float); it takes an integer"),
    (int, True, "argument is True (bool); it takes an integer"),
    (int, np.array([1]), "argument is a numpy.ndarray of shape [1]; it takes an integer"),
    (float, "1", "argument is '1' (str); it takes a number"),
    (float, 1j, "argument is 1j (complex); it takes a number"),
    (float, False, "argument is False (bool); it takes a number"),
    (bool, 2, "argument is 2 (int); it takes True or False"),
    (Sequence[int], "12", "argument is '12' (str); it takes a sequence of integers"),
    (Sequence[int], 1, "argument is 1 (int); it takes a sequence of integers"),
    (Sequence[int], [1.5], "argument is [1.5] (list); it takes a sequence of integers"),
    (Sequence[int], {1: 2}, "argument is {1: 2} (dict); it takes a sequence of integers"),
    (
        Sequence[tuple[int, int]] | None,
        [1, 1],
        "argument is [1, 1] (list); it takes a sequence of pairs of integers or None",
    ),
    (Literal["a", "b", "c"], 1, "argument is 1 (int); it takes 'a', 'b' or 'c'"),
    (torch.device | str, 1.5, "argument is 1.5 (float); it takes torch.device or a string"),
    (torch.Tensor, None, "argument is None; it takes a tensor"),
    (torch.nn.Module, "net", "argument is 'net' (str); it takes a module"),
    (
        torch.Tensor,
        np.ones(2),
        "argument is a numpy.ndarray of shape [2]; it takes a tensor; make one with "
        "torch.from_numpy",
    ),
    (int, torch.ones(2), "argument is a torch.Tensor of shape [2]; it takes an integer"),
    (Mapping[str, int], [], "argument is [] (list); it takes a dict"),
    (Callable[..., Any], 1, "argument is 1 (int); it takes a function"),
    (Path, 1, "argument is 1 (int); it takes a Path"),
]


def ours(function: Any) -> Any:
    """``function`` as one of gpudist's: others take what they like."""
    function.__module__ = "gpudist.of_tests"
    return function


def taking(annotation: Any) -> Callable[..., None]:
    def function(argument: Any) -> None: ...

    function.__annotations__ = {"argument": annotation}
    return ours(function)


@pytest.mark.parametrize(("annotation", "values"), RIGHT)
def test_right(annotation: Any, values: list[Any]) -> None:
    for value in values:
        check(taking(annotation), "f", (value,), {})
        check(taking(annotation), "f", (), {"argument": value})


@pytest.mark.parametrize(("annotation", "value", "text"), WRONG)
def test_wrong(annotation: Any, value: Any, text: str) -> None:
    for args, kwargs in (((value,), {}), ((), {"argument": value})):
        with pytest.raises(ShapeError) as caught:
            check(taking(annotation), "f", args, kwargs)
        assert str(caught.value) == f"f: {text}"


def test_long_values_are_shortened() -> None:
    with pytest.raises(ShapeError) as caught:
        check(taking(int), "f", ("x" * 1000,), {})
    assert len(str(caught.value)) < 150


class Thing(Checked):
    @ours
    def __init__(self, size: int, *, name: str = "") -> None:
        self.size = size


class Special(Thing):
    @ours
    def __init__(self, size: Sequence[int]) -> None:
        super().__init__(len(size))


def test_a_class_checks_its_own_constructor() -> None:
    assert Thing(2, name="a").size == 2 and Special([1, 2]).size == 2
    with pytest.raises(ShapeError, match=r"^Thing: size is None; it takes an integer$"):
        Thing(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"^Special: size is 3 "):
        Special(3)  # pyright: ignore[reportArgumentType]


class Foreign(Thing):
    def __init__(self, size: "no type at all", **more: Any) -> None:  # noqa: F722  # pyright: ignore
        super().__init__(2)


def test_a_subclass_of_a_user_takes_what_it_likes() -> None:
    assert Foreign("small", color=3).size == 2


def test_the_error_of_a_function() -> None:
    @checked(CheckpointError)
    @ours
    def save(path: str, P: Partition | None = None) -> str:
        return path

    assert save("a") == "a" and save.__name__ == "save"
    with pytest.raises(CheckpointError, match=r"save: path is 1 "):
        save(1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PartitionError, match=r"save: P is 2 .*takes a Partition or None"):
        save("a", 2)  # pyright: ignore[reportArgumentType]


def test_missing_and_unknown_arguments_are_for_python() -> None:
    for call in (lambda: Thing(), lambda: Thing(1, other=2), lambda: Thing(1, 2, 3)):  # pyright: ignore
        with pytest.raises(TypeError) as caught:
            call()
        assert not isinstance(caught.value, GpudistError)


def test_a_partition_without_a_topology() -> None:
    P_world = Partition(LoopbackTransport.single(), [0])
    with pytest.raises(PartitionError, match=r"DistributedConv2d: .*has no Cartesian topology"):
        nn.DistributedConv2d(P_world, 2, 2, 3)  # pyright: ignore[reportArgumentType]


def test_what_a_partition_is_made_of() -> None:
    mesh: Any = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    x, shape = torch.ones(2, 2), (1, np.int64(2))
    with pytest.raises(PartitionError, match=r"P_x is .* create one with P_world.grid\(1, 2\)"):
        gpudist.scatter(x, shape)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(PartitionError, match=r"with P_world.create_mesh_partition\(mesh\)"):
        gpudist.scatter(x, mesh)
    with pytest.raises(PartitionError, match=r"P_x is \(1, 'b'\) .*takes a CartesianPartition$"):
        gpudist.scatter(x, (1, "b"))  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_numbers_of_numpy_do_what_numbers_of_python_do() -> None:
    P_world = Partition(LoopbackTransport.single(), [0])
    P = P_world.create_cartesian_topology_partition([1, 1, 1, 1])
    x: Any = torch.rand(1, 2, 6, 6)
    same = [
        (
            gpudist.halo_exchange(x, P, halo=[(1, 1), (2, 0)], periodic=[True, False]),
            gpudist.halo_exchange(
                x, P, halo=np.array([[1, 1], [2, 0]]), periodic=np.array([True, False]),  # pyright: ignore
                global_shape=np.array(x.shape),  # pyright: ignore
            ),
        ),
        (
            gpudist.halo_exchange(x, P, [HaloWidths(1, 1), SlidingWindow(3)]),
            gpudist.halo_exchange(
                x, P, [HaloWidths(np.int64(1), np.int64(1)), SlidingWindow(np.int32(3))]  # pyright: ignore
            ),
        ),
        (
            nn.DistributedMaxPool2d(P, 2, padding=1)(x),
            nn.DistributedMaxPool2d(P, np.int64(2), padding=np.array([1, 1]))(x),  # pyright: ignore
        ),
        (gpudist.gather(x, P, 0), gpudist.gather(x, P, np.int64(0))),  # pyright: ignore
        (
            gpudist.all_gather(x, P, [0, 1]),
            gpudist.all_gather(x, P, np.array([0, 1])),  # pyright: ignore
        ),
    ]  # fmt: skip
    for expected, found in same:
        assert torch.equal(expected, found)
