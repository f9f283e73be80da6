"""A stand-in for CuPy arrays: arrays in host memory, and streams that record their operations."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gpudist
from gpudist.errors import ShapeError, TransportError
from gpudist.ops.arrays import TENSOR, apply_to_array
from gpudist.world.partition import Partition
from tests.pool import distributed


class FakeStream:
    def __init__(self, name: str, pointer: int, log: list[str]) -> None:
        self.name, self.ptr, self.cuda_stream, self.log = name, pointer, pointer, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeArray:
    """``cupy.ndarray``."""

    def __init__(self, cells: np.ndarray, log: list[str], device: int = 0) -> None:
        self.cells, self.log = cells, log
        self.device = SimpleNamespace(id=device)
        self.strides, self.dtype = cells.strides, cells.dtype

    def copy(self) -> FakeArray:
        self.log.append("CuPy copies")
        return FakeArray(self.cells.copy(), self.log, self.device.id)

    def __dlpack__(self, *, stream: int | None) -> object:
        assert stream == -1
        return self.cells.__dlpack__()


FakeArray.__module__ = "cupy"


class FakeTensor:
    """An output on a GPU."""

    def __init__(self, tensor: torch.Tensor, log: list[str]) -> None:
        self.tensor, self.log = tensor, log

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"the output is kept for {stream.name}")

    def __dlpack__(self, *, stream: int | None) -> object:
        assert stream == -1
        return self.tensor.__dlpack__()


class FakeOperator:
    """Doubles its input."""

    def __init__(self, log: list[str], device: str = "cuda:0") -> None:
        self.log = log
        self.P_x = SimpleNamespace(device=torch.device(device))
        self.agreement: Any = self
        self.kind = self.owners_kind = TENSOR
        self.kinds: list[int] = []
        self.fails = False

    def reject(self, error: Exception) -> None:
        raise error

    def __call__(self, x: torch.Tensor | None) -> FakeTensor:
        self.log.append("the operator runs")
        self.kinds.append(self.kind)
        if self.fails:
            raise TransportError("it fails")
        return FakeTensor(torch.ones(2) if x is None else 2 * x, self.log)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def use_cupy(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> Callable[[int, int], None]:
    """Return a function that installs a fake CuPy, with pointers of torch's and CuPy's streams."""

    def use(ours: int, theirs: int) -> None:
        stream = FakeStream("CuPy's stream", theirs, log)
        cupy: Any = ModuleType("cupy")
        cupy.cuda = SimpleNamespace(get_current_stream={0: stream}.__getitem__)
        cupy.from_dlpack = lambda capsule: FakeArray(torch.from_dlpack(capsule).numpy(), log)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        torchs = FakeStream("torch's stream", ours, log)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torchs)

        def external(pointer: int, device: torch.device) -> FakeStream:
            assert (pointer, device) == (theirs, torch.device("cuda:0"))
            return stream

        monkeypatch.setattr(torch.cuda, "ExternalStream", external)

    return use


IN_ORDER = [
    "torch's stream waits for CuPy's stream",
    "the operator runs",
    "the output is kept for CuPy's stream",
    "CuPy's stream waits for torch's stream",
]


def test_cupy_is_ordered_with_torch(use_cupy: Callable[..., None], log: list[str]) -> None:
    use_cupy(ours=16, theirs=32)
    operator = FakeOperator(log)
    x = FakeArray(np.arange(3.0), log)
    y: Any = apply_to_array(operator, x)  # pyright: ignore[reportArgumentType]
    assert type(y) is FakeArray and y.cells.tolist() == [0.0, 2.0, 4.0]
    assert log == IN_ORDER
    assert operator.kind == TENSOR and operator.kinds != [TENSOR]


def test_streams_of_outputs_are_kept(
    use_cupy: Callable[..., None], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy destroys a stream that nobody holds, and torch goes on to use it."""
    use_cupy(ours=16, theirs=48)
    stream = weakref.ref(sys.modules["cupy"].cuda.get_current_stream(0))
    apply_to_array(FakeOperator(log), FakeArray(np.ones(2), log))  # pyright: ignore[reportArgumentType]
    monkeypatch.undo()
    gc.collect()
    assert stream() is not None


def test_cupy_waits_for_what_failed(use_cupy: Callable[..., None], log: list[str]) -> None:
    use_cupy(ours=16, theirs=32)
    operator = FakeOperator(log)
    operator.fails = True
    with pytest.raises(TransportError, match="it fails"):
        apply_to_array(operator, FakeArray(np.ones(2), log))  # pyright: ignore[reportArgumentType]
    assert log == [IN_ORDER[0], IN_ORDER[1], IN_ORDER[3]]
    assert operator.kind == TENSOR


def test_one_stream_needs_no_events(use_cupy: Callable[..., None], log: list[str]) -> None:
    use_cupy(ours=0, theirs=0)
    y: Any = apply_to_array(FakeOperator(log), FakeArray(np.ones(2), log))  # pyright: ignore
    assert y.cells.tolist() == [2.0, 2.0]
    assert log == ["the operator runs"]


def test_cupy_copies_before_torch_waits(use_cupy: Callable[..., None], log: list[str]) -> None:
    use_cupy(ours=16, theirs=32)
    x = FakeArray(np.arange(3.0)[::-1], log)
    y: Any = apply_to_array(FakeOperator(log), x)  # pyright: ignore[reportArgumentType]
    assert y.cells.tolist() == [4.0, 2.0, 0.0]
    assert log == ["CuPy copies", *IN_ORDER]


def test_none_where_the_owner_gave_cupys(use_cupy: Callable[..., None], log: list[str]) -> None:
    use_cupy(ours=16, theirs=32)
    given = FakeOperator(log)
    apply_to_array(given, FakeArray(np.ones(2), log))  # pyright: ignore[reportArgumentType]
    operator = FakeOperator(log)
    (operator.owners_kind,) = given.kinds
    log.clear()
    y: Any = apply_to_array(operator, None)
    assert type(y) is FakeArray
    assert log[0] == "the operator runs"
    assert log[-1] == "CuPy's stream waits for torch's stream"


@pytest.mark.parametrize(
    ("device", "x", "message"),
    [
        ("cpu", FakeArray(np.ones(2), [], 1), "CuPy array is on cuda:1 but .* device is cpu; move"),
        ("cuda:0", FakeArray(np.ones(2), [], 1), "CuPy array is on cuda:1 but .* is cuda:0"),
        ("cuda:1", np.ones(2), "NumPy array is on cpu but the partition's device is cuda:1; move"),
    ],
)
def test_other_devices(device: str, x: Any, message: str, log: list[str]) -> None:
    with pytest.raises(ShapeError, match=f"FakeOperator: the {message}"):
        apply_to_array(FakeOperator(log, device), x)
    assert log == []


@distributed(ranks=2, transports=["loopback"])
def test_cupy_without_gpus(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    x: Any = FakeArray(np.ones(2), [])
    imported = "cupy" in sys.modules
    with pytest.raises(ShapeError, match=r"CuPy array is on cuda:0 but the partition's .* cpu"):
        gpudist.all_gather(x, P_x, [0])
    assert ("cupy" in sys.modules) == imported
