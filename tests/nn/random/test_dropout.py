"""Dropout drops the same cells under every partition, at random, and again when repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist import nn
from gpudist.errors import GpudistError, PartitionError, ShapeError
from gpudist.geometry.boxes import Box
from gpudist.nn.random import cells, composed_cells
from gpudist.planning import profile_of
from gpudist.planning.clock import Clock
from gpudist.transport.dry import DryTransport
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    assert_block_of,
    assert_same_as_sequential,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

F64 = torch.float64
# Per layer, a shape of its input.
SHAPES: dict[str, tuple[int, ...]] = {
    "Dropout": (4, 5, 6),
    "Dropout1d": (4, 5, 6),
    "Dropout2d": (4, 5, 3, 2),
    "Dropout3d": (4, 5, 2, 3, 2),
    "AlphaDropout": (4, 5, 6),
    "FeatureAlphaDropout": (4, 5, 6),
}
Placed = tuple[Sequence[int], Sequence[int] | None, Cut | None]
GRIDS: dict[str, Placed] = {
    "batch": ((3, 1, 1), [5, 0, 2], None),
    "features": ((1, 1, 3), [0, 1, 2], None),
    "all, uneven and empty": ((2, 2, 1), [3, 1, 4, 0], {0: [1, 3], 1: [5, 0]}),
}


def make(layer: str, P_x: CartesianPartition, *args: Any, **options: Any) -> torch.nn.Module:
    return getattr(nn, f"Distributed{layer}")(P_x, *args, **options)


def on_grid(P_world: Partition, case: str, dims: int) -> tuple[CartesianPartition, Cut | None]:
    """Return the grid of a case, followed by unpartitioned dims."""
    shape, ranks, sizes = GRIDS[case]
    return grid(P_world, (*shape, *(1,) * (dims - 3)), ranks), sizes


def alone(P_world: Partition, dims: int) -> CartesianPartition:
    """This worker, so that its block is the whole tensor."""
    assert P_world.rank is not None
    return grid(P_world, (1,) * dims, [P_world.rank])


@pytest.mark.parametrize("case", GRIDS)
@pytest.mark.parametrize("layer", SHAPES)
@distributed(ranks=6, transports=["loopback"])
def test_torchs_generator_bit_by_bit(P_world: Partition, layer: str, case: str) -> None:
    """The final state of the generator and a second call are equal too."""
    shape = SHAPES[layer]
    P_x, sizes = on_grid(P_world, case, len(shape))
    distributed = make(layer, P_x, 0.3, generator="torch")
    sequential = getattr(torch.nn, layer)(0.3)
    for dtype in (F64, torch.float32, torch.bfloat16):
        whole = random_like_all(shape, 1).to(dtype).requires_grad_()
        block = own_block(whole, P_x, sizes)
        torch.manual_seed(3)
        y_whole = sequential(sequential(whole))
        state = torch.get_rng_state()
        torch.manual_seed(3)
        y = distributed(distributed(block))
        assert torch.equal(torch.get_rng_state(), state) or not P_x.active
        where = own_slices(shape, P_x, sizes)
        assert_block_of(y.detach(), y_whole.detach(), where, "output", 0)
        cotangent = random_like_all(shape, 2).to(dtype)
        y_whole.backward(cotangent)
        y.backward(torch.zeros_like(y) if where is None else cotangent[where])
        assert whole.grad is not None
        assert_block_of(block.grad, whole.grad, where, "gradient", 0)


@pytest.mark.parametrize("case", GRIDS)
@pytest.mark.parametrize("layer", SHAPES)
@distributed(ranks=6, transports=["loopback"])
def test_the_same_cells_under_every_partition(P_world: Partition, layer: str, case: str) -> None:
    shape = SHAPES[layer]
    P_x, sizes = on_grid(P_world, case, len(shape))
    distributed, whole_layer = (
        make(layer, P, 0.4, seed=11) for P in (P_x, alone(P_world, len(shape)))
    )
    outputs: list[torch.Tensor] = []
    for batch in (4, 4, 2):
        # Uneven blocks of a dim that is split may not change.
        whole = random_like_all((4 if P_x.shape[0] > 1 else batch, *shape[1:]), batch)
        y = distributed(own_block(whole, P_x, sizes)).detach()
        expected = whole_layer(whole)
        assert_block_of(y, expected, own_slices(whole.shape, P_x, sizes), "output", 0)
        outputs.append(expected)
    assert not torch.equal(outputs[0], outputs[1]), "two calls dropped the same cells"


@distributed(ranks=4)
def test_on_every_transport(P_world: Partition) -> None:
    """Without a seed, all ranks take one from the first worker, a new one per layer."""
    P_x = grid(P_world, (1, 3), [2, 0, 1])
    torch.manual_seed(P_world.rank or 0)
    first, second = nn.DistributedDropout(P_x), nn.DistributedDropout(P_x)
    block = torch.ones(40, 2)
    for layer in (first, second):
        y = layer(block if P_x.active else torch.empty(0))
        assert P_x.active or y.shape == (0,)
    if P_x.active:
        seeds = [int(layer.seed.item()) for layer in (first, second) if layer.seed is not None]
        assert all(row == seeds for row in P_x.allgather_data(seeds))
        assert seeds[0] != seeds[1]
        blocks = first(block).long().flatten().tolist(), second(block).long().flatten().tolist()
        rows = P_x.allgather_data([*blocks[0], *blocks[1]])
        assert len({tuple(half) for row in rows for half in (row[:80], row[80:])}) == 6


@distributed(ranks=2, transports=["loopback"])
def test_seeds_follow_torchs(P_world: Partition) -> None:
    P_x = grid(P_world, (2, 1))
    results: list[torch.Tensor] = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(nn.DistributedDropout(P_x), nn.DistributedDropout(P_x))
        results.append(layers(torch.ones(3, 20)))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_cells_are_dropped_at_random(p: float) -> None:
    """The mean, and pairs: neighbours in each dim, and the same cell in two calls or seeds."""
    shape = (50, 40, 60)
    masks = [
        cells.draw_kept(
            cells.Key(torch.tensor(seed), torch.tensor(call)),
            cells.Cells(Box.whole(shape), shape),
            p,
            torch.device("cpu"),
        )
        for seed, call in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    first = masks[0]
    deviation = (p * (1 - p) / first.numel()) ** 0.5
    for mask in masks:
        assert abs(mask.double().mean().item() - (1 - p)) < 4 * deviation
    pairs = [(first, other) for other in masks[1:]]
    pairs += [(first.narrow(d, 0, n - 1), first.narrow(d, 1, n - 1)) for d, n in enumerate(shape)]
    pairs += [(first[:, :, :-k], first[:, :, k:]) for k in (2, 8, 32)]
    for a, b in pairs:
        assert chi_square(a, b, p) < 20  # 3 degrees of freedom: exceeded once in 6000


def chi_square(a: torch.Tensor, b: torch.Tensor, p: float) -> float:
    """Chi-squared statistic of the four pairs of values, against independent cells."""
    kept, dropped = 1 - p, p
    total = 0.0
    for x, of_x in ((a, kept), (~a, dropped)):
        for y, of_y in ((b, kept), (~b, dropped)):
            expected = a.numel() * of_x * of_y
            total += ((x & y).sum().item() - expected) ** 2 / expected
    return total


def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, box = (6, 1, 50, 7), Box((1, 0, 7, 0), (6, 1, 44, 5))
    device = torch.device("cpu")
    key = cells.Key(torch.tensor(0), torch.tensor(0))
    monkeypatch.setattr(cells, "_draws_on", lambda device: False)

    def kept() -> list[torch.Tensor]:
        torch.manual_seed(1)
        by_torch = composed_cells.draw_kept_by_torch(box, shape, 0.3)
        return [by_torch, cells.draw_kept(key, cells.Cells(box, shape), 0.3, device)]

    whole = kept()
    torch.manual_seed(1)
    drawn = torch.empty(shape).bernoulli_(0.7).bool()[box.slices]
    assert torch.equal(whole[0], drawn)
    monkeypatch.setattr(composed_cells, "_TILE_CELLS", 100)
    for tiled, at_once in zip(kept(), whole, strict=True):
        assert torch.equal(tiled, at_once)


def test_large_tensors_are_drawn_as_torchs() -> None:
    shape = (3, 200_001)
    torch.manual_seed(1)
    expected = torch.nn.Dropout(0.25)(torch.ones(shape)) != 0
    torch.manual_seed(1)
    assert torch.equal(composed_cells.draw_kept_by_torch(Box.whole(shape), shape, 0.25), expected)


@pytest.mark.parametrize("layer", SHAPES)
@distributed(ranks=4, transports=["loopback"])
def test_without_dropping(P_world: Partition, layer: str) -> None:
    """Nothing is drawn in evaluation, nor for the probabilities 0 and 1."""
    shape = SHAPES[layer]
    P_x = grid(P_world, (1, 3, *(1,) * (len(shape) - 2)), [0, 1, 3])
    for p, trains in ((0.4, False), (0.0, True), (1.0, True)):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        sequential = getattr(torch.nn, layer)(p).train(trains)
        distributed = make(layer, P_x, p).train(trains)
        assert_same_as_sequential(
            lambda made=sequential: made,
            lambda made=distributed: made,
            P_x,
            P_x,
            shape,
            tolerance=0,
        )
        torch.manual_seed(1)
        distributed(own_block(random_like_all(shape, 1), P_x))
        assert torch.equal(torch.get_rng_state(), before)


class Network(torch.nn.Module):
    """Two calls of one layer and one of another, so that the order of calls matters."""

    def __init__(self, P_x: CartesianPartition, generator: Any) -> None:
        super().__init__()
        self.shared = nn.DistributedDropout(P_x, 0.4, generator=generator)
        self.other = nn.DistributedDropout1d(P_x, 0.4, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(x.sin()).exp()
        return self.shared(self.other(y).cos()).exp()


@pytest.mark.parametrize("generator", ["index", "torch"])
@pytest.mark.parametrize("reentrant", [False, True])
@distributed(ranks=3, transports=["loopback", "host"])
def test_a_checkpoint_repeats_the_call(P_world: Partition, reentrant: bool, generator: str) -> None:
    """Two regions are alive at once, and one of them runs backward twice."""
    P_x = grid(P_world, (1, 2, 1), [2, 0])
    results: list[list[torch.Tensor | None]] = []
    for checkpointed in (False, True):
        torch.manual_seed(4)
        network = Network(P_x, generator)
        x = own_block(random_like_all((2, 4, 5), 1), P_x)

        def region(
            x: torch.Tensor, network: Network = network, checkpointed: bool = checkpointed
        ) -> torch.Tensor:
            if checkpointed:
                return checkpoint(network, x, use_reentrant=reentrant)  # pyright: ignore
            return network(x)

        first = region(x)
        second = region(x + first.detach()) + first
        second.pow(2).sum().backward(retain_graph=not reentrant)
        if not reentrant:
            second.sum().backward()
        after = network(x)
        results.append([first.detach(), second.detach(), x.grad, after.detach()])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert actual is not None and expected is not None
        assert torch.equal(actual, expected)


@distributed(ranks=2, transports=["loopback"])
def test_a_repetition_that_is_unclear_is_refused(P_world: Partition) -> None:
    P_x = grid(P_world, (2, 1))
    layer = nn.DistributedDropout(P_x, 0.4)
    x = torch.randn(2, 3, requires_grad=True)
    y: Any = checkpoint(layer, x.exp(), use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(GpudistError, match="DistributedDropout: called in a backward pass"):
        y.exp().sum().backward()
    outputs: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append(checkpoint(lambda x: layer(x).exp(), x, use_reentrant=False))
    with pytest.raises(GpudistError, match="only between forward passes"):
        outputs[0].sum().backward()


@distributed(ranks=2, transports=["loopback"])
def test_a_seed_anew_before_each_step(P_world: Partition) -> None:
    P_x = grid(P_world, (2, 1))
    layer = nn.DistributedDropout(P_x, 0.4, seed=1)
    for _ in range(3):
        torch.manual_seed(1)
        x = torch.ones(2, 30, requires_grad=True)
        y: Any = checkpoint(lambda x: layer(x).square(), x, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * y)


@distributed(ranks=3, transports=["loopback"])
def test_a_state_dict_goes_on_alike(P_world: Partition) -> None:
    P_x = grid(P_world, (2, 1), [2, 0])
    layer = nn.DistributedDropout(P_x)
    x = own_block(random_like_all((4, 9), 1), P_x, requires_grad=False)
    layer(x)
    resumed = nn.DistributedDropout(P_x)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    assert list(state) == ["seed", "calls"] and state["calls"] == 1
    resumed.load_state_dict(state)
    for _ in range(2):
        assert torch.equal(layer(x), resumed(x))
    sequential = torch.nn.Sequential(torch.nn.Dropout()).state_dict()
    torch.nn.Sequential(resumed).load_state_dict(sequential)
    assert resumed.calls == 3


@pytest.mark.parametrize("options", [{"shape": "dynamic"}, {"global_shape": (4, 6)}])
@distributed(ranks=3, transports=["loopback"])
def test_other_agreements(P_world: Partition, options: dict[str, Any]) -> None:
    P_x = grid(P_world, (1, 3))
    layer = nn.DistributedDropout(P_x, seed=3, **options)
    whole_layer = nn.DistributedDropout(alone(P_world, 2), seed=3, shape="dynamic")
    shapes = [(4, 6), (4, 6), (2, 5)] if "shape" in options else [(4, 6), (2, 6)]
    for shape in shapes:
        y = layer(own_block(torch.ones(shape), P_x)).detach()
        assert_block_of(y, whole_layer(torch.ones(shape)), own_slices(shape, P_x), "output", 0)


@distributed(ranks=4, transports=["loopback"])
def test_what_is_not_supported_is_refused(P_world: Partition) -> None:
    P_x, P_2 = grid(P_world, (2, 2, 1)), grid(P_world, (2, 2))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"p": 1.5}, "p is 1.5; it must be between 0 and 1"),
        ({"inplace": True}, "inplace is not supported"),
        ({"generator": "philox"}, "use 'index' or 'torch'"),
        ({"generator": "torch", "seed": 1}, "omit seed"),
        ({"seed": -2}, "seed is -2; it must be between 0 and"),
    ]
    for options, text in refused:
        with pytest.raises(ShapeError, match=f"DistributedAlphaDropout: .*{text}"):
            nn.DistributedAlphaDropout(P_x, **options)
    with pytest.raises(PartitionError, match=r"Dropout2d: P_x has shape \[2, 2, 1\] but needs"):
        nn.DistributedDropout2d(P_x)
    with pytest.raises(PartitionError, match=r"2 of features, and the batch in front"):
        nn.DistributedDropout2d(P_2)
    with pytest.raises(PartitionError, match="with or without one for the batch"):
        nn.DistributedDropout3d(P_x)
    with pytest.raises(PartitionError, match="needs axes for the batch and the channels"):
        nn.DistributedFeatureAlphaDropout(grid(P_world, (4,)))
    with pytest.raises(ShapeError, match=r"has 2 dims, not 3"):
        nn.DistributedDropout(P_x)(torch.randn(2, 2))
    wire = DryTransport(0, 1, Clock(profile_of("h100"), 0), lambda shape, *_: tuple(shape))
    P_x = grid(Partition(wire, [0]), (1,))
    with pytest.raises(
        ShapeError, match="needs a CPU, but the partition's device is meta; use 'in"
    ):
        nn.DistributedDropout(P_x, generator="torch")


def by_mask(x: torch.Tensor, y: torch.Tensor, p: float, is_alpha: bool) -> torch.Tensor:
    """Dropout of ``x`` by torch's operations, with the cells that have been dropped in ``y``."""
    low, scale = 0.0, 1 / (1 - p)
    if is_alpha:
        low = torch.nn.functional.selu(torch.tensor(-1e9, dtype=F64)).item()
        scale = ((1 - p) * (1 + p * low**2)) ** -0.5
    shift = -scale * p * low
    kept = (y.detach() - (scale * low + shift)).abs() > 1e-12
    assert kept.any() and not kept.all()
    return torch.where(kept, x, low) * scale + shift


def slopes(y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """First, second and third derivatives of a function of each cell of ``x``."""
    found: list[torch.Tensor] = []
    total = y.pow(3).sum()
    for order in range(3):
        (slope,) = torch.autograd.grad(total, x, create_graph=order < 2)
        found.append(slope.detach())
        total = (slope * slope.detach().cos()).sum()
    return found


@pytest.mark.parametrize("layer", SHAPES)
@distributed(ranks=4, transports=["loopback"])
def test_double_backward(P_world: Partition, layer: str) -> None:
    """Gradients of gradients drop the cells of their forward, also after another call."""
    shape = SHAPES[layer]
    P_x = grid(P_world, (1, 3, *(1,) * (len(shape) - 2)), [0, 1, 3])
    for options in ({"seed": 5}, {"generator": "torch"}):
        torch.manual_seed(3)
        distributed = make(layer, P_x, 0.4, **options)
        x = own_block(random_like_all(shape, 1), P_x)
        y = distributed(x)
        distributed(x)
        expected = by_mask(x, y, 0.4, "Alpha" in layer) if P_x.active else x.clone()
        for found, one in zip(slopes(y, x), slopes(expected, x), strict=True):
            torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-12)


@distributed(ranks=3, transports=["host"])
def test_compiled(P_world: Partition) -> None:
    P_x = grid(P_world, (1, 2, 1), [2, 0])
    results: list[list[torch.Tensor | None]] = []
    torch.compiler.reset()
    for compiled in (True, False):
        torch.manual_seed(4)
        layers = torch.nn.Sequential(
            nn.DistributedDropout(P_x, 0.4, seed=5), nn.DistributedAlphaDropout(P_x, 0.3, seed=6)
        )
        function: Any = layers
        if compiled:
            function = torch.compile(layers, fullgraph=True, backend="aot_eager")
        x = own_block(random_like_all((2, 4, 5), 1), P_x)
        y = function(function(x).sin())
        y.pow(2).sum().backward()
        results.append([y.detach(), x.grad])
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@distributed(ranks=3, transports=["host"])
def test_forward_mode(P_world: Partition) -> None:
    P_x = grid(P_world, (1, 2), [2, 0])
    x = own_block(random_like_all((2, 5), 1), P_x, requires_grad=False)
    first, second = (nn.DistributedDropout(P_x, seed=5) for _ in range(2))
    moved: Any = torch.func.jvp(first, (x,), (2 * x,))
    y, tangent = moved
    assert torch.equal(tangent, 2 * y)
    assert torch.equal(y, second(x))
