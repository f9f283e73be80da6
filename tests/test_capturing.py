"""Training steps as graphs, with a stand-in for CUDA's: what is replayed, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gpudist
from gpudist.capturing import CapturedStep
from gpudist.errors import GpudistError, ShapeError
from gpudist.transport.base import Transport
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.transport.worlds import shared_ranks


class _Repeated:
    """Stand-in for a CUDA graph: calls again what was recorded, on the tensors of the capture.

    Numbers that are no tensors, and tensors of the caller, are those of the recording.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        self._state = network.state_dict()
        self._call: Callable[[], Any] = lambda: None
        self._result: Any = None
        self.closed = 0

    def run(self, call: Callable[[], Any]) -> Any:
        return call()

    def record(self, call: Callable[[], Any]) -> Any:
        before = {name: x.clone() for name, x in self._state.items()}
        self._call, self._result = call, call()
        for name, x in self._state.items():
            x.copy_(before[name])
        return self._result

    def replay(self) -> None:
        self._result.copy_(self._call())

    def close(self) -> None:
        self.closed += 1


class Training:
    """A small network and its steps, eager or captured."""

    def __init__(self, P_world: Partition, captured: bool, lr: Any = 0.1) -> None:
        torch.manual_seed(0)
        self.network = torch.nn.Linear(3, 2).double()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=lr)
        self.graph = _Repeated(self.network)
        self.step: Any = self._step
        if captured:
            self.step = CapturedStep(self._step, P_world, self.graph, 2)

    def _step(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = scale * self.network(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def inputs(count: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3, dtype=torch.float64) for _ in range(count)]


def test_every_call_is_one_step() -> None:
    P_world = gpudist.init()
    eager, captured = Training(P_world, False), Training(P_world, True)
    expected = [eager.step(x) for x in inputs()]
    found = [captured.step(x) for x in inputs()]
    assert captured.step.is_captured
    # Later replays do not overwrite results.
    assert torch.equal(torch.stack(found), torch.stack(expected))
    for mine, others in zip(captured.network.parameters(), eager.network.parameters(), strict=True):
        assert torch.equal(mine, others)


def test_inputs_of_the_caller_are_not_kept() -> None:
    training = Training(gpudist.init(), True)
    given = inputs(1)[0]
    before = given.clone()
    for x in [given, *inputs(4)]:
        training.step(x)
    assert torch.equal(given, before)


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.zeros(5, 3, dtype=torch.float64),), r"shape \[5, 3\].*was.*shape \[4, 3\].*step"),
        ((torch.zeros(4, 3),), "float32 tensor.*float64"),
        ((torch.zeros(3, 4, dtype=torch.float64).T,), r"strides \(1, 4\).*strides \(3, 1\)"),
        ((1.0,), "a float, but was a torch.float64 tensor"),
        ((torch.zeros(4, 3, dtype=torch.float64), 2.0), "is 2.0, but was 1.0.*pass a tensor"),
        ((), "the same arguments"),
    ],
)
def test_other_inputs_are_refused(args: tuple[Any, ...], words: str) -> None:
    training = Training(gpudist.init(), True)
    for x in inputs(4):
        training.step(x, 1.0)
    weight = training.network.weight.clone()
    with pytest.raises(ShapeError, match=f"(?s){words}"):
        training.step(*args, *(() if len(args) != 1 else (1.0,)))
    assert torch.equal(training.network.weight, weight)


@pytest.mark.parametrize("constant", [np.ones(2), object(), {"table": [np.ones(2)]}, abs])
def test_constants_that_may_change_are_refused(constant: Any) -> None:
    training = Training(gpudist.init(), True)
    with pytest.raises(ShapeError, match=r"argument 1 of a captured step: a \w+ may change"):
        training.step(inputs(1)[0], constant)


def test_inputs_with_gradients_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"requires gradients.*detach"):
        Training(gpudist.init(), True).step(with_gradient(inputs(1)[0]))


def test_inputs_elsewhere_are_refused() -> None:
    with pytest.raises(ShapeError, match="is on meta; move it to cpu before the call"):
        Training(gpudist.init(), True).step(inputs(1)[0].to("meta"))


def test_changed_learning_rate_is_refused() -> None:
    training = Training(gpudist.init(), True)
    *first, last = inputs(4)
    for x in first:
        training.step(x)
    training.optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(
        GpudistError, match=r"lr of parameter group 0 of SGD is 0.05, but.*with 0.1"
    ):
        training.step(last)


def test_learning_rate_in_a_tensor_may_change() -> None:
    rates = [0.1, 0.1, 0.1, 0.02, 0.3]
    found: list[torch.Tensor] = []
    for captured in (False, True):
        training = Training(gpudist.init(), captured, torch.tensor(0.1, dtype=torch.float64))
        for x, rate in zip(inputs(), rates, strict=True):
            training.optimizer.param_groups[0]["lr"].fill_(rate)
            training.step(x)
        found.append(training.network.weight.detach())
    assert torch.equal(*found)


@distributed(2, transports=["loopback", "host"])
def test_a_step_that_one_rank_cannot_capture_is_refused_on_all(P_world: Partition) -> None:
    training = Training(P_world, True)
    record = training.graph.record

    def fails(call: Callable[[], Any]) -> Any:
        record(call)
        raise RuntimeError("operation not permitted when stream is capturing")

    if P_world.rank == 1:
        training.graph.record = fails
    first, second, third = inputs(3)
    training.step(first), training.step(second)  # pyright: ignore[reportUnusedExpression]
    words = (
        r"cannot be captured: rank 1: RuntimeError: operation not permitted.*item\(\).*capturable"
    )
    with pytest.raises(GpudistError, match=f"(?s){words}"):
        training.step(third)


class _Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.drop = torch.nn.Dropout()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("only here")
        return x.sum(-1, keepdim=True) * 0 + self.drop(self.weight)


@distributed(2, transports=["loopback", "host"])
def test_ranks_draw_alike_after_a_refused_capture(P_world: Partition) -> None:
    torch.manual_seed(0)
    network = gpudist.distribute(_Dropping(), P_world.grid(2, 1), inputs={"x": "block"})
    graph = _Repeated(network)

    def step(x: torch.Tensor) -> torch.Tensor:
        return network(x).to_local().detach()

    captured, x = CapturedStep(step, P_world, graph, 1), torch.ones(1, 3)
    captured(x)
    network.fails = P_world.rank == 1
    with pytest.raises(GpudistError, match="rank 1: OutOfMemoryError"):
        captured(x)
    network.fails = False
    kept = [int(cell) for cell in (step(x).flatten() != 0).tolist()]
    kept.append(int(torch.randint(1 << 30, ()).item()))
    assert len({tuple(row) for row in P_world.allgather_data(kept)}) == 1


def _ends_first(wire: Transport) -> tuple[int, str]:
    training = Training(Partition(wire, range(wire.size)), True)
    for x in inputs(4):
        training.step(x)
    wire.close()
    try:
        training.step(inputs(1)[0])
    except GpudistError as error:
        return training.graph.closed, str(error)
    return training.graph.closed, ""


def test_it_ends_before_its_world() -> None:
    for outcome in shared_ranks().run(2, _ends_first, timeout_s=20.0, kind="nccl"):
        assert outcome.error is None
        closed, words = outcome.value
        assert closed == 1
        assert "has been closed" in words


def test_on_a_cpu_it_is_the_plain_step() -> None:
    training = Training(gpudist.init(), False)
    step = gpudist.capture(training.step)
    for x in inputs():
        step(x)
    step(torch.zeros(7, 3, dtype=torch.float64))
    assert not step.is_captured


def test_warm_up_is_at_least_one() -> None:
    with pytest.raises(GpudistError, match="warm_up is 0; at least one"):
        gpudist.capture(lambda: torch.zeros(()), warm_up=0)
