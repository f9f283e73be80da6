"""Global tensors written to new plain tensors: blocks go to blocks, and the results stay right."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist.sbp.scope import Record
from gpudist.world.partition import Partition
from tests.convert.training import assert_as_alone
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed

T = torch.Tensor
SHAPE = (2, 3, 5, 6)


class Writing(nn.Module):
    """A forward that writes to new tensors, with a weight and a convolution."""

    def __init__(self, write: Callable[[Any, T], Any]) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.rand(3, 1, 1, generator=torch.Generator().manual_seed(1)))
        self.kept: list[T] = []

    def forward(self, x: T) -> Any:
        found = self.write(self, x * self.weight)
        self.kept.clear()
        return found


class Filter(nn.Module):
    """A filter of the low Fourier modes, whose real and imaginary parts are written to zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 3, 3))

    def forward(self, x: T) -> T:
        modes = torch.fft.rfft2(x, norm="ortho").permute(0, 2, 3, 1)
        real, imaginary = (torch.zeros(modes.shape, dtype=x.dtype, device=x.device) for _ in "ri")
        low = modes[:, :, :2]
        real[:, :, :2] = torch.relu(low.real @ self.weight[0] - low.imag @ self.weight[1])
        imaginary[:, :, :2] = torch.relu(low.imag @ self.weight[0] + low.real @ self.weight[1])
        modes = torch.view_as_complex(torch.stack([real, imaginary], -1)).permute(0, 3, 1, 2)
        return torch.fft.irfft2(modes, s=x.shape[2:], norm="ortho") + x


class Solver(nn.Module):
    """Steps of an ordinary differential equation, of which all states are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, y: T) -> T:
        t = torch.linspace(0, 1, 4)
        solution = torch.empty(len(t), *y.shape, dtype=y.dtype, device=y.device)
        solution[0] = y
        for j in range(1, len(t)):
            y = y + (t[j] - t[j - 1]).to(y.dtype) * torch.tanh(self.rate(y))
            solution[j] = y
        return solution


def _zeros(x: T, *shape: int) -> T:
    return torch.zeros(shape or x.shape, dtype=x.dtype, device=x.device)


def _like(x: T, y: T, index: Any, value: T) -> T:
    y[index] = value
    return x + y


def _twice(n: Any, x: T) -> T:
    y = _zeros(x)
    y[:, :, 1:-1] = x[:, :, :3]
    y[..., ::2] = x.flip(3)[..., ::2]
    y[-1] += x[0]
    return y


def _plain_first(n: Any, x: T) -> T:
    y = _zeros(x, 2, *x.shape)
    y[0] = 3.0
    y[1, :, 0] = torch.arange(6.0)
    y[0, ..., 1:3] = x[..., 1:3]
    return y


def _new(n: Any, x: T) -> T:
    y = x.new_full((4, *x.shape[1:]), 2.0)
    y[1:3] = x
    return y


def _cast(n: Any, x: T) -> T:
    y = torch.ones(x.shape).to(x)
    y[:, 1] = x[:, 0]
    return y * x


def _without_grad(n: Any, x: T) -> tuple[T, T]:
    y, z = _zeros(x), _zeros(x)
    with torch.no_grad():
        y[:, :2] = x[:, 1:]
        z[0] = 5 * x[1]
    z[1] = x[0]
    return y * x, z


def _double(n: Any, x: T) -> T:
    y = _zeros(x)
    y[:, :, 1:] = x[:, :, 1:] ** 3
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return g * y


def _kept(n: Any, x: T) -> T:
    y = _zeros(x)
    n.kept.append(y)
    y[1:] = x[:1]
    return n.kept[0] + x


def _in_checkpoint(n: Any, x: T) -> T:
    def run(x: T) -> T:
        y = _zeros(x, 2, *x.shape)
        y[0], y[1] = x.tanh(), x.exp()
        return y.prod(0)

    return checkpoint(run, x, use_reentrant=False)


def _other_dtype(n: Any, x: T) -> T:
    y = torch.zeros(x.shape)
    y[:, 1:] = x.detach().float()[:, 1:]
    return x * y.double()


def _new_dim(n: Any, x: T) -> T:
    y = _zeros(x, 1, *x.shape)
    y[0, :, None, 1] = x[:, :1]
    y[None, ..., 2] = x[..., 0]
    return y


# Forwards whose writes move no more than the cells that are not where they are written to.
SPLIT: dict[str, Callable[[Any, T], Any]] = {
    "all": lambda n, x: _like(x, _zeros(x), ..., x),
    "int": lambda n, x: _like(x, _zeros(x), (slice(None), -1), x[:, 0]),
    "twice": _twice,
    "plain first": _plain_first,
    "new": _new,
    "cast": _cast,
    "without grad": _without_grad,
    "double": _double,
    "kept": _kept,
    "checkpoint": _in_checkpoint,
    "other dtype": _other_dtype,
    "new dim": _new_dim,
}  # fmt: skip


def _view(n: Any, x: T) -> tuple[T, T]:
    y = _zeros(x)
    z = y[:, 1:]
    y[:, :2] = x[:, :2]
    return z * x[:, 1:], y


def _view_of_class(n: Any, x: T) -> tuple[T, T]:
    y = _zeros(x)
    z = y.detach()
    y[0] = x[0].detach()
    z[1] = 7.0
    return z + x, y * x


def _parameter(n: Any, x: T) -> T:
    y = _zeros(x)
    # No function of torch sees how a parameter comes to share the memory.
    z = nn.Parameter(y, requires_grad=False)
    y[0] = x[0].detach()
    return z + x


def _saved(n: Any, x: T) -> T:
    y = _zeros(x) + 2
    z = torch.full_like(y, 3.0)
    product = x * z
    z = z.clone()
    z[0] = x[0]
    return product + z * y


def _array(n: Any, x: T) -> T:
    y = _zeros(x)
    array = y.numpy()
    y[1] = x[1].detach()
    return x * torch.from_numpy(array.copy())


def _mask(n: Any, x: T) -> T:
    y = _zeros(x)
    y[torch.tensor([True, False])] = x[:1]
    y[[1]] = x[1:]
    return y


def _of_leaf(n: Any, x: T) -> T:
    y = _zeros(x)
    y[:, :1] = torch.ones(5, 6, dtype=x.dtype) * n.weight[0]
    y[:, 1:] = x[:, 1:]
    return y


def _returned(n: Any, x: T) -> tuple[T, T]:
    y, unused = _zeros(x), _zeros(x)
    assert unused.shape == x.shape and unused.dtype == x.dtype
    return x + y, x * unused


# Forwards in which something else refers to the tensor, or the index has no rule.
WHOLE: dict[str, Callable[[Any, T], Any]] = {
    "view": _view, "detached": _view_of_class, "parameter": _parameter, "saved": _saved,
    "array": _array, "mask": _mask, "of a leaf": _of_leaf, "nothing": _returned,
}  # fmt: skip
NETWORKS = {
    **{f"split, {name}": lambda write=write: Writing(write) for name, write in SPLIT.items()},
    **{f"whole, {name}": lambda write=write: Writing(write) for name, write in WHOLE.items()},
    "split, filter": Filter,
    "split, solver": Solver,
}


@pytest.mark.filterwarnings("ignore:.*are gathered by moving")
@pytest.mark.parametrize("kind", ["split", "whole"])
@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (2, 1, 1, 1)])
@distributed(ranks=2, transports=["loopback"])
def test_as_alone(P_world: Partition, shape: tuple[int, ...], kind: str) -> None:
    for name in (one for one in NETWORKS if one.startswith(kind)):
        try:
            assert_as_alone(NETWORKS[name], grid(P_world, shape), [SHAPE], steps=1)
        except Exception as error:
            raise AssertionError(name) from error


@distributed(ranks=3, transports=["loopback"])
def test_empty_blocks(P_world: Partition) -> None:
    def write(n: Any, x: T) -> T:
        y = _zeros(x, 4, *x.shape[1:])
        y[1:3] = x
        y[:2, 1] = x[:, 0]
        return y

    P_x = grid(P_world, [3, 1, 1, 1])
    assert_as_alone(lambda: Writing(write), P_x, [(2, 3, 2, 2)], steps=1)


@pytest.mark.filterwarnings("ignore:.*are gathered by moving")
@distributed(ranks=2, transports=["loopback"])
def test_gathers_only_what_others_refer_to(P_world: Partition) -> None:
    for name, make in NETWORKS.items():
        net: Any = gpudist.distribute(make().double(), grid(P_world, [1, 1, 2, 1]))
        record = net._gpudist_conversion.scope.record = Record(lambda: 0)
        net(own_block(random_like_all(SHAPE, 1), net.P_x))
        gathered = [row.function for row in record.rows if row.is_gathered]
        is_whole = name.startswith("whole") and name != "whole, nothing"
        assert bool(gathered) == is_whole, (name, gathered)


@distributed(ranks=2, transports=["loopback"])
def test_solver_moves_halos_alone(P_world: Partition) -> None:
    net: Any = gpudist.distribute(Solver().double(), grid(P_world, [1, 1, 2, 1]))
    record = net._gpudist_conversion.scope.record = Record(
        lambda: sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))
    )
    solution = net(own_block(random_like_all(SHAPE, 1), net.P_x))
    assert solution.sbp == (gpudist.sbp.split(3),)
    assert not [r for r in record.rows if r.sent_bytes and "conv2d" not in r.function]


@distributed(ranks=2, transports=["host"])
def test_recorded_graphs_gather(P_world: Partition) -> None:
    alone, P_x = Solver(), grid(P_world, [1, 1, 2, 1])
    net = gpudist.distribute(copy.deepcopy(alone), P_x)
    x = random_like_all(SHAPE, 1).float()
    block = own_block(x, P_x, requires_grad=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gpudist.compiled(net, block, backend="eager")(block)
    assert_equal_to(found.full_tensor(), alone(x).detach(), 1e-5, "compiled")
