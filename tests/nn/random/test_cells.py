"""Numbers of the native core against those of torch's operations, and dropout that draws again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist.exchange.tracing import Watching
from gpudist.geometry.boxes import Box
from gpudist.nn import DistributedDropout
from gpudist.nn.random import cells
from gpudist.nn.random.cells import (
    Cells,
    Key,
    bernoulli_by_index,
    draw_kept,
    normal_by_index,
    uniform_by_index,
)
from gpudist.nn.random.drop import drop_by_index
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Difference of the last bits of a normal number, whose size is that of a number near 1.
NORMAL = {torch.float64: 8e-15, torch.float32: 5e-7, torch.float16: 4e-3, torch.bfloat16: 4e-2}

# Of seed 5 and call 1.
UNIFORM = ["0x1.acb4a9b7c111bp-1", "0x1.ba71792dc144fp-1", "0x1.47fdbf8cab580p-6"]
NORMALS = ["-0x1.4e0915b6f8dcdp-2", "-0x1.c2b38724bad59p-5", "-0x1.3c53c4a2ab42cp-1"]


def by_torch(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], *args: Any) -> Any:
    """Call a function without the native core."""
    with monkeypatch.context() as patched:
        patched.setattr(cells, "_draws_on", lambda device: False)
        return call(*args)


def block_of(draw: random.Random) -> tuple[Box, tuple[int, ...]]:
    """Draw a box, perhaps empty, of a tensor in which it may be far from the first cell."""
    extents = [draw.choice((1, 2, 3, 5, 9, 17, 40)) for _ in range(draw.randint(0, 5))]
    starts = [draw.choice((0, draw.randint(0, 7))) for _ in extents]
    if extents:
        starts[draw.randrange(len(starts))] += draw.choice((0, 1 << 33))
        extents[draw.randrange(len(extents))] *= draw.choice((0, 1, 1, 1, 1, 1))
    stops = [start + extent for start, extent in zip(starts, extents, strict=True)]
    shape = tuple(stop + draw.randint(0, 3) for stop in stops)
    return Box(tuple(starts), tuple(stops)), shape


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "transposed" and x.dim():
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "strided" and x.dim():
        return torch.stack((x, x), -1).flatten(-2)[..., 1::2]
    if how == "expanded" and x.dim():
        return x[..., :1].expand(x.shape)
    return x


@pytest.mark.parametrize("seed", range(6))
def test_numbers_are_those_of_torchs_operations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    for number in range(12):
        box, shape = block_of(draw)
        dtype, p = draw.choice(DTYPES), draw.choice((0.001, 0.1, 0.5, 0.9))
        key, cells = (
            Key(torch.tensor(draw.getrandbits(62)), torch.tensor(number)),
            Cells(box, shape),
        )
        kept = draw_kept(key, cells, p, CPU)
        assert torch.equal(kept, by_torch(monkeypatch, draw_kept, key, cells, p, CPU))
        assert torch.equal(kept, draw_kept(Key(int(key.seed), number), cells, p, CPU))
        given = (key, cells, dtype, CPU)
        uniform = uniform_by_index(*given)
        assert torch.equal(uniform, by_torch(monkeypatch, uniform_by_index, *given))
        normal, expected = normal_by_index(*given), by_torch(monkeypatch, normal_by_index, *given)
        torch.testing.assert_close(normal, expected, rtol=0, atol=NORMAL[dtype])
        for probability in (laid_out(torch.rand(box.shape).to(dtype), "transposed"), p):
            ones = bernoulli_by_index(*given, probability)
            assert torch.equal(ones, (uniform < probability).to(dtype))


@pytest.mark.parametrize("how", ["contiguous", "transposed", "strided", "expanded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_is_torchs_operations_of_the_mask(
    dtype: torch.dtype, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values with their signs, gradients, and gradients of gradients; dims that share a mask."""
    draw = random.Random(f"{dtype} {how}")
    for number in range(8):
        box, shape = block_of(draw)
        leading = draw.randint(0, len(shape))
        p = draw.choice((0.1, 0.7))
        rest = Key(7, number), Cells.leading(box, shape, leading), p
        leaf = laid_out(torch.randn(box.shape).to(dtype), how).detach()
        results: list[list[torch.Tensor]] = []
        for call in (drop_by_index, lambda *args: by_torch(monkeypatch, drop_by_index, *args)):
            x, g = leaf.clone().requires_grad_(), laid_out(leaf.cos(), how).detach()
            y = call(x, *rest)
            (of_x,) = torch.autograd.grad(y, x, g.requires_grad_(), create_graph=True)
            (of_g,) = torch.autograd.grad(of_x, g, leaf)
            results.append([y.detach(), of_x.detach(), of_g, call(leaf, *rest)])
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected)
            assert torch.equal(found.signbit(), expected.signbit())
        assert torch.equal(results[0][0], results[0][3])


def test_numbers_stay_the_same() -> None:
    """Numbers of a fixed seed, so that runs can be repeated with later versions."""
    given = Key(5, 1), Cells(Box((3, 1), (4, 4)), (9, 4))
    uniform = uniform_by_index(*given, torch.float64, CPU)
    normal = normal_by_index(*given, torch.float64, CPU)
    assert [x.hex() for x in uniform.flatten().tolist()] == UNIFORM
    assert [x.hex() for x in normal.flatten().tolist()] == NORMALS
    kept = draw_kept(*given, 0.5, CPU)
    # The number that decides is the uniform one with its upper half first.
    assert torch.equal(kept, (uniform + 0.5).remainder(1) >= 0.5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_transforms_use_the_same_mask() -> None:
    rest = Key(7, 1), Cells(Box.whole((4, 5)), (4, 5)), 0.4
    x, tangent = torch.randn(2, 4, 5).unbind()
    pair: Any = torch.func.jvp(lambda x: drop_by_index(x, *rest), (x,), (tangent,))
    y, moved = pair
    assert torch.equal(y, drop_by_index(x, *rest))
    assert torch.equal(moved, drop_by_index(tangent, *rest))
    both = torch.func.vmap(lambda x: drop_by_index(x, *rest))(torch.stack((x, tangent)))
    assert torch.equal(both, torch.stack((y, moved)))
    x.requires_grad_()
    (batched,) = torch.autograd.grad(
        drop_by_index(x, *rest), x, torch.stack((x.detach(), tangent)), is_grads_batched=True
    )
    assert torch.equal(batched, both)
    negative = torch.view_as_complex(torch.randn(4, 5, 2)).conj().imag
    assert torch.equal(drop_by_index(negative, *rest), drop_by_index(negative.clone(), *rest))


class Operations(Watching):
    """Names of the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in ("empty_like", "new_empty", "detach"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@distributed(ranks=2, transports=["loopback"])
def test_backward_draws_again(P_world: Partition) -> None:
    """No mask is kept. What changes after forward does not matter."""
    layer = DistributedDropout(grid(P_world, (2, 1)), 0.4, seed=5)
    x = torch.randn(30, 20, requires_grad=True)
    layer(x)
    kept: list[torch.Tensor] = []
    saving = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with saving, Operations() as operations:
        y = layer(x)
    # One of them draws the token of the call on the CPU.
    assert operations.names == ["randint", "_local_scalar_dense", "clone", "add_"]
    assert [t.nbytes for t in kept] == [8]
    assert layer.seed is not None and layer.calls is not None
    layer.seed.fill_(6)
    layer.calls.fill_(100)
    with Operations() as operations:
        (gradient,) = torch.autograd.grad(y, x, x.detach())
    assert operations.names == []
    assert torch.equal(gradient, y)
