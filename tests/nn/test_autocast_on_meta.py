"""Autocast of tensors without data: the dtypes, the copies of parameters, and the memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist.exchange.tracing import Watching
from gpudist.nn.autocast import META_AS
from gpudist.nn.autocast_on_meta import autocast_on_meta
from gpudist.planning import profile_of, recompute
from gpudist.planning.live_bytes import LiveBytes
from gpudist.planning.rehearsal import DryNetwork
from gpudist.world.partition import Partition
from tests.pool import distributed

BF16, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
HOST = replace(profile_of("h100"), wire="host")

# Function, shapes of its tensors, and its dtype under autocast of GPUs.
CASES: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], torch.dtype]] = [
    (F.conv2d, ((2, 4, 8, 8), (4, 4, 3, 3)), BF16),
    (F.linear, ((2, 4), (3, 4), (3,)), BF16),
    (operator.matmul, ((2, 4), (4, 3)), BF16),
    (torch.add, ((2, 4), (2, 4)), FLOAT),
    (torch.exp, ((2, 4),), FLOAT),
    (lambda x: F.group_norm(x.bfloat16(), 2), ((2, 4, 3),), FLOAT),
    (lambda x: x.bfloat16().softmax(1), ((2, 4),), FLOAT),
    (lambda x: x.half().softmax(1), ((2, 4),), FLOAT),
    (lambda x: x.bfloat16().softmax(1, dtype=DOUBLE), ((2, 4),), DOUBLE),
    (lambda x: x.bfloat16().sum(), ((2, 4),), FLOAT),
    (lambda x: x.bfloat16().norm(), ((2, 4),), FLOAT),
    (lambda x: x.bfloat16().relu(), ((2, 4),), BF16),
    (lambda x, y: torch.dot(x.bfloat16(), y), ((4,), (4,)), FLOAT),
    (lambda x, y: F.linear(x.double(), y.double()), ((2, 4), (3, 4)), DOUBLE),
]


def of_meta(shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    return [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("function", "shapes", "dtype"), CASES)
def test_dtypes_are_those_of_gpus(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    inputs = of_meta(shapes)
    with autocast_on_meta("cuda", BF16):
        y = function(*inputs)
    assert y.dtype == dtype and y.is_meta
    y.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == FLOAT for x in inputs)


@pytest.mark.parametrize(("function", "shapes", "dtype"), [c for c in CASES if len(c[1][0]) > 1])
def test_dtypes_are_those_of_cpus(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    with torch.autocast("cpu", BF16):
        expected = function(*(torch.ones(shape) for shape in shapes))
    with autocast_on_meta("cpu", BF16):
        assert function(*of_meta(shapes)).dtype == expected.dtype


def test_what_gpus_refuse_is_refused() -> None:
    x = torch.empty(2, 4, device="meta")
    with autocast_on_meta("cuda", BF16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x, x)


def test_autocast_ends_with_the_context() -> None:
    x, weight = of_meta(((2, 4), (4, 4)))
    with autocast_on_meta("cuda", HALF):
        assert torch.is_autocast_enabled("cuda") and (x @ weight).dtype == HALF
        torch.set_autocast_enabled("cuda", False)
        assert (x @ weight).dtype == FLOAT
    assert META_AS.type == "meta" and not torch.is_autocast_enabled("cuda")
    assert (x @ weight).dtype == FLOAT
    real = torch.ones(4, 4)
    with autocast_on_meta("cuda", HALF):
        assert (real @ real).dtype == FLOAT


def test_a_parameter_is_cast_once() -> None:
    (x, weight), found = of_meta(((2, 4), (4, 4))), []

    class Casts(Watching):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._to_copy.default:
                found.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        with Casts(), autocast_on_meta("cuda", BF16):
            ((x @ weight) @ weight).relu()
    assert found == 2 * [(2, 4), (4, 4)]


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = x * 2
        return checkpoint(self.block, x, use_reentrant=False)


def layers(kind: str = "") -> nn.Module:
    """Return layers that torch computes in 16 bits, and a norm."""
    torch.manual_seed(0)
    made = nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(n, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            for n in (4, 16)
        )
    )
    if kind == "recomputed":
        return recompute(made)
    return Checkpointed(made) if kind == "checkpointed" else made


SHAPE = (2, 4, 32, 32)


@pytest.mark.parametrize("kind", ["", "recomputed", "checkpointed"])
@distributed(ranks=2, transports=["host"])
def test_memory_is_that_of_a_step_under_autocast(P_world: Partition, kind: str) -> None:
    P_x = P_world.grid(1, 1, 2, 1)
    dry = DryNetwork(layers(kind), SHAPE, HOST, True, "sgd", amp=BF16)
    expected = dry.rehearse((1, 1, 2, 1), P_world.rank or 0).memory.total
    network = gpudist.distribute(layers(kind), P_x)
    x = torch.randn(2, 4, 16, 32) + (P_world.rank or 0)
    live = LiveBytes()

    class Tensors(Watching):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for y in tree_leaves((args, kwargs, result)):
                if isinstance(y, torch.Tensor):
                    live.add(y)
            return result

    def step() -> None:
        network.zero_grad(set_to_none=True)
        with torch.autocast("cpu", BF16):
            loss = F.cross_entropy(network(x).to_local(), torch.zeros(2, 16, 32, dtype=torch.long))
        loss.backward()

    step()
    network.zero_grad(set_to_none=True)
    with Tensors():
        step()
    assert live.peak_bytes == pytest.approx(expected, rel=0.12)


def test_a_step_on_gpus_needs_less_memory_and_time_in_16_bits() -> None:
    """Convolutions in 16 bits keep half of what others keep, and are faster for many channels."""
    network = nn.Sequential(*(nn.Conv2d(256, 256, 3, padding=1) for _ in range(4)))
    memory, seconds = [], []
    for amp in (None, BF16):
        dry = DryNetwork(network, (8, 256, 64, 64), profile_of("h200"), True, "sgd", amp=amp)
        done = dry.rehearse((1, 1, 1, 1), 0)
        memory.append(done.memory)
        seconds.append(done.seconds(overlapped=True))
    assert memory[1].activations < 0.9 * memory[0].activations
    assert memory[1].parameters == memory[0].parameters
    assert seconds[1] < 0.7 * seconds[0]
