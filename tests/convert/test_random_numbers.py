"""Random numbers of a converted network are those of the sequential one that draws by index."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist import distribute
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed

SHAPE = (3, 2, 4, 6)
F64 = torch.float64


class DropPath(nn.Module):
    """Stochastic depth as in timm: samples are dropped, by numbers of a new tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6)
        kept.div_(0.6)
        return x * kept


class StochasticDepth(nn.Module):
    """Stochastic depth as in torchvision, of samples and of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.empty([x.shape[0]] + [1] * 3, dtype=x.dtype, device=x.device).bernoulli_(0.6)
        batch = torch.empty([1] * 4, dtype=x.dtype, device=x.device).bernoulli_(0.6)
        return x * rows.div_(0.6) + x * batch.div_(0.6)


class Attention(nn.Module):
    """Attention of a plain tensor, such as learned queries, and of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(random_like_all((1, 5, 6), 1))
        self.layer = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, queries = x.flatten(1, 2), self.queries
        own, _ = self.layer(queries, queries, queries)
        y, _ = self.layer(tokens, tokens, tokens, need_weights=False)
        causal = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True)
        return (y + own.mean()).unflatten(1, x.shape[1:3]) + causal


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 6, 2, dropout=0.4, batch_first=True, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1, 2))[0]


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def plain() -> torch.Tensor:
    return torch.ones(4, 6, dtype=F64)


def drawn_in_place(x: torch.Tensor) -> torch.Tensor:
    """Return the product with numbers of every distribution that fills a tensor."""
    for name, given in (
        *(("normal_", (1, 2)), ("uniform_", (1, 2)), ("exponential_", (2,)), ("random_", (5,))),
        *(("geometric_", (0.3,)), ("log_normal_", ()), ("cauchy_", ())),
    ):
        for like in (x, plain()):
            x = x * getattr(torch.empty_like(like), name)(*given)
    return x


def chosen(x: torch.Tensor) -> torch.Tensor:
    """Return what a branch chooses by a random number."""
    return x * torch.rand_like(x) if torch.rand(()) < 0.5 else x * 2


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(F.dropout2d(x, 0.3), 0.3) * F.dropout(plain(), 0.3),
    "alpha dropout": lambda x: F.feature_alpha_dropout(F.alpha_dropout(x, 0.3, True), 0.3, True),
    "factories": lambda x: x * torch.rand(4, 6) + torch.randn(SHAPE) + torch.normal(0.0, 1.0, (6,)),
    "integers": lambda x: (
        x[:, :, torch.randperm(4)][..., torch.randperm(6)] * torch.randint(9, (6,))
    ),
    "like": lambda x: x * torch.rand_like(x) + torch.randn_like(x) + torch.rand_like(plain()),
    "like integers": lambda x: x * torch.randint_like(x, 9) + torch.randint_like(plain(), 9),
    "complex": lambda x: (x * torch.randn_like(x + 0j) + torch.rand_like(plain() + 0j)).abs(),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()) + torch.bernoulli(plain() / 2),
    "in place": drawn_in_place,
    "means": lambda x: torch.normal(x, 1.0) + torch.normal(x, x.abs() + 1) + torch.poisson(x.abs()),
    "multinomial": lambda x: x * torch.multinomial(x.detach().flatten(1).abs(), 3).sum(),
    "activations": lambda x: F.rrelu(F.gumbel_softmax(x, dim=2) - 0.3, training=True),
    "initial values": lambda x: x * nn.init.normal_(plain()) * nn.init.kaiming_uniform_(plain()),
    "a branch": lambda x: chosen(chosen(chosen(x))),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{"drop path": DropPath, "stochastic depth": StochasticDepth, "attention": Attention},
    **{"recurrent": Recurrent},
    **{name: (lambda f=f: Function(f)) for name, f in FUNCTIONS.items()},
}


class Net(nn.Module):
    """A part that draws, computed once more in backward if asked for."""

    def __init__(self, part: nn.Module, repeats: bool | None) -> None:
        super().__init__()
        self.part, self.repeats = part, repeats
        self.scale = nn.Parameter(random_like_all((1, 2, 1, 1), 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.repeats is None:
            return self.part(x * self.scale)
        y: Any = checkpoint(self.part, x * self.scale, use_reentrant=self.repeats)
        return y


def made(name: str, repeats: bool | None) -> Net:
    torch.manual_seed(2)
    return Net(MODULES[name](), repeats)


def sequential(name: str, repeats: bool | None) -> tuple[torch.Tensor, Any]:
    """Return the output and the gradient of the second call."""
    net, x = made(name, repeats), random_like_all(SHAPE, 1)
    torch.manual_seed(5)
    with gpudist.draws_by_index():
        net(x)
        y = net(x)
    return followed(y, y, net)


def converted(name: str, repeats: bool | None, P_world: Partition, shape: Any) -> Any:
    net: Any = distribute(made(name, repeats), grid(P_world, shape))
    # The network agrees on the seed of the first rank.
    torch.manual_seed(5 if P_world.rank == 0 else 50)
    x = own_block(random_like_all(SHAPE, 1), net.P_x, requires_grad=False)
    net(x)
    y = net(x)
    return followed(y, y.full_tensor(), net)


def followed(y: torch.Tensor, whole: torch.Tensor, net: Any) -> tuple[torch.Tensor, Any]:
    if y.requires_grad:
        y.square().sum().backward()
    return whole.detach(), net.scale.grad


def assert_same_numbers(P_world: Partition, shape: list[int], repeats: bool | None) -> None:
    names = list(MODULES)
    if prod(shape) < P_world.size:
        names.remove("multinomial")  # has no rule, and raises on workers without probabilities
    for name in names:
        y, gradient = sequential(name, None)
        found = converted(name, repeats, P_world, shape)
        if P_world.rank == 0:
            assert_equal_to(found[0], y, 1e-10, f"{name}, output")
            if gradient is not None:
                assert_equal_to(found[1], gradient, 1e-9, f"{name}, gradient")


@pytest.mark.filterwarnings("ignore:.*are gathered by moving")
@distributed(ranks=[1, 2, 3], transports=["host", "loopback"])
def test_numbers_on_a_line(P_world: Partition) -> None:
    assert_same_numbers(P_world, [1, 1, 1, P_world.size], False)


@pytest.mark.filterwarnings("ignore:.*are gathered by moving")
@pytest.mark.parametrize("shape", [[1, 1, 2, 2], [2, 1, 1, 1]], ids=str)
@distributed(ranks=4, transports=["loopback"])
def test_numbers_on_a_grid(P_world: Partition, shape: list[int]) -> None:
    assert_same_numbers(P_world, shape, None)


@pytest.mark.parametrize("name", ["dropout", "drop path", "attention", "in place"])
def test_the_sequential_network_repeats_its_draws(name: str) -> None:
    """Recomputation outside of the context repeats the numbers; other seeds give other ones."""
    y, gradient = sequential(name, None)
    for repeats in (False, True):
        again = sequential(name, repeats)
        assert torch.equal(again[0], y)
        assert_equal_to(again[1], gradient, 1e-12, "gradient")
    with gpudist.draws_by_index():
        other = made(name, None)(random_like_all(SHAPE, 1))
    assert not torch.equal(other, y)


def test_a_given_generator_is_used() -> None:
    x = torch.zeros(5)
    expected = torch.rand(5, generator=torch.Generator().manual_seed(3))
    with gpudist.draws_by_index():
        assert torch.equal(torch.rand(5, generator=torch.Generator().manual_seed(3)), expected)
        x.uniform_(generator=torch.Generator().manual_seed(3))
    assert torch.equal(x, expected)


@pytest.mark.filterwarnings("ignore:.*are gathered by moving")
@distributed(ranks=2, transports=["loopback"])
def test_a_generator_draws_the_whole_tensor(P_world: Partition) -> None:
    def filled(x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        for name in ("normal_", "uniform_", "exponential_", "bernoulli_"):
            x = x + getattr(torch.empty_like(x), name)(generator=generator)
        return x + torch.bernoulli(torch.full_like(x, 0.5), generator=generator)

    net: Any = distribute(Function(filled), grid(P_world, [1, 1, 2, 1]))
    x = random_like_all(SHAPE, 1)
    y = net(own_block(x, net.P_x, requires_grad=False)).full_tensor()
    assert_equal_to(y, filled(x), 1e-12, "output")
