"""Modules whose forward has effects: recomputed in backward, these happen once, to the bit."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections import deque
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import gpudist
from gpudist import ConversionError, Plan
from gpudist.planning import recompute
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed

HALF = torch.full((4, 1, 1), 0.5, dtype=torch.float64)


class Count:
    n = 0


class Block(nn.Module):
    """A convolution, and what the effect of its name makes of it."""

    def __init__(self, effect: str) -> None:
        super().__init__()
        self.before, self.effect = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)), effect
        if effect in LAYERS:
            self.after = LAYERS[effect]()
        self.n, self.seen, self.by, self.own = 0, [1.0], {"last": deque([1.0], 2)}, Count()
        self.last: Any = None
        self.frozen = nn.Parameter(HALF.clone(), requires_grad=False)
        self.learned = nn.Parameter(HALF.clone())
        self.book: Any
        self.register_buffer("book", torch.linspace(-1, 1, 8, dtype=torch.float64))
        self.calls: Any
        self.register_buffer("calls", torch.tensor(0))
        self.running = torch.zeros((), dtype=torch.float64)
        self.links = torch.eye(2).to_sparse()

    def forward(self, x: Tensor, debug: bool = False, function: Any = torch.tanh) -> Tensor:
        x = function(self.before(x)) * (3 if debug else 1)
        return self.after(x) if self.effect in LAYERS else getattr(self, self.effect)(x)

    def codebook(self, x: Tensor) -> Tensor:
        nearest = (x.detach().mean((0, 2, 3))[:, None] - self.book).abs().argmin(1)
        y = x * self.book.index_select(0, nearest)[:, None, None] + (self.book**2).sum()
        hits = nn.functional.one_hot(nearest, 8).sum(0) + x.detach().mean()
        self.book.data.lerp_(hits, 0.1)
        return y

    def synchronized(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 2, 3))
        with torch.no_grad():
            self.book[:4].mul_(0.9).add_(mean, alpha=0.1)
        return x - mean[:, None, None] * self.book[:4, None, None].clone()

    def attribute(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * self.n

    def buffer(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls % 3)

    def appended(self, x: Tensor) -> Tensor:
        self.seen.append(sum(self.seen))
        self.by["last"].append(self.seen[-1])
        return x * self.by["last"][0]

    def window(self, x: Tensor) -> Tensor:
        self.seen.append(sum(self.seen))
        y = x * sum(self.seen)
        self.seen = self.seen[-2:]
        return y

    def maximum(self, x: Tensor) -> Tensor:
        y = x / (1 + self.running)
        self.running = torch.maximum(self.running, x.detach().abs().amax())
        return y

    def random(self, x: Tensor) -> Tensor:
        return x * random.random() + (x if np.random.rand() < 0.5 else 2 * x) * torch.rand(())

    def rebound(self, x: Tensor) -> Tensor:
        self.book = self.book * 0.5
        return x * self.book[:4, None, None]

    def cached(self, x: Tensor) -> Tensor:
        self.last = x if self.last is None else x + 0.1 * self.last.detach()
        return self.last * 2

    def kept(self, x: Tensor) -> Tensor:
        if self.last is not None:
            self.last.detach().mul_(2)
            x = x * self.last.detach()
        self.last = x * 2
        return self.last

    def object(self, x: Tensor) -> Tensor:
        self.own.n += 1
        return x * self.own.n

    def frozen_parameter(self, x: Tensor) -> Tensor:
        y = x * self.frozen.clone()
        self.frozen.data.mul_(0.9)
        return y

    def first_call(self, x: Tensor) -> Tensor:
        is_first, self.later = not hasattr(self, "later"), True
        return x * (2 if is_first else 3)

    def parameter(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.learned.mul_(0.9)
        return x + self.learned


LAYERS: dict[str, Any] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "spectral norm": lambda: spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
    "parametrized": lambda: parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
    "masks": lambda: nn.Sequential(nn.Dropout(0.5), nn.FeatureAlphaDropout(0.5)),
}
METHODS = [
    "codebook", "synchronized", "attribute", "buffer", "appended", "window", "maximum", "random",
    "rebound", "cached", "object", "frozen_parameter", "first_call",
]  # fmt: skip


def network(effect: str) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 1), nn.Sequential(Block(effect), Block(effect))).double()


def trained(made: Any, x: Tensor) -> list[Any]:
    """Outputs of two calls for each backward, gradients, and what the blocks keep."""
    torch.manual_seed(2)
    random.seed(3)
    np.random.seed(4)
    values: list[Any] = []
    for _ in range(2):
        ys = [made(x), made(2 * x)]
        made.eval()
        torch.stack([(y * y).sum() for y in ys]).sum().backward(retain_graph=True)
        ys[0].sum().backward()
        made.train()
        values += ys
    values += [p.grad for p in made.parameters() if p.grad is not None]
    values += [*made.buffers(), made[1][0].frozen]
    for block in made[1]:
        values += [block.n, block.seen, [*block.by["last"]], block.own.n, block.running, block.last]
    values = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in values]
    return [x.tolist() if isinstance(x, Tensor) else x for x in values]


@pytest.mark.parametrize("effect", [*LAYERS, *METHODS])
def test_effects_happen_once(effect: str) -> None:
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    assert trained(recompute(network(effect)), x) == trained(network(effect), x)


@distributed(ranks=2, transports=["loopback"])
def test_effects_happen_once_by_a_plan(P_world: Partition) -> None:
    P_x, plan = grid(P_world, [1, 1, 2, 1]), Plan()
    plan.recompute("1.0")
    plan.recompute("1.1")
    x = torch.arange(16.0, dtype=torch.float64).view(1, 1, 4, 4) / (8 + (P_world.rank or 0))
    # Ranks that are threads share the random numbers of Python.
    for effect in {*LAYERS, *METHODS} - {"random"}:
        made: Any = [gpudist.distribute(network(effect), P_x, edits) for edits in (plan, None)]
        twin = copy.deepcopy(made[0])
        assert twin[1][0].forward.module is twin[1][0]
        assert trained(made[0], x) == trained(made[1], x), effect
    made = gpudist.distribute(network("parameter"), P_x, plan)
    with pytest.raises(ConversionError, match=r"its tensors \['learned'\] were changed"):
        made(x).sum().backward()


def test_recomputed_networks_are_copied_and_take_all_keywords() -> None:
    made: Any
    made, x = recompute(network("buffer")), torch.ones(1, 1, 4, 4, dtype=torch.float64)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        twin(x).sum().backward()
        assert int(twin[1][0].calls) == 1 and int(made[1][0].calls) == 0
        assert twin[1][0].forward.module is twin[1][0]
    how: dict[str, Any] = {"debug": True, "function": torch.relu}
    y = network("buffer")[1][0](x.expand(1, 4, 4, 4), **how)
    assert torch.equal(made[1][0](x.expand(1, 4, 4, 4), **how), y)


def test_no_call_keeps_the_graph_of_an_earlier_one() -> None:
    made: Any
    made, x = recompute(network("cached")), torch.ones(1, 1, 4, 4, dtype=torch.float64)
    made(x)
    first = ref(made[1][0].last)
    for _ in range(3):
        y = made(x)
    gc.collect()
    assert first() is None
    made[1][0].book.add_(1)
    with pytest.raises(ConversionError, match=r"\['book'\] were changed in place"):
        y.sum().backward()
    made = recompute(network("kept"))
    made(x)
    with pytest.raises(ConversionError, match=r"\['\(an attribute\)'\] were changed in place"):
        made(x).sum().backward()
    made = recompute(network("synchronized"))
    made[1][0].view = made[1][0].book[:2]
    with pytest.raises(ConversionError, match="shared memory was changed in place"):
        made(x).sum().backward()


class Doubling(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def test_a_changed_argument_raises() -> None:
    (block,) = recompute(nn.Sequential(Doubling(nn.Conv2d(1, 4, 1)))).children()
    for args, kwargs in (((torch.ones(1, 1, 4, 4),), {}), ((), {"x": torch.ones(1, 1, 4, 4)})):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            block(*args, **kwargs).sum().backward()
