"""Random numbers by index on a GPU: those of a CPU, bit by bit, and new ones at each replay."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import gpudist
from gpudist import nn
from gpudist.errors import GpudistError
from gpudist.geometry.boxes import Box
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
from tests.gpu.devices import ON_DOUBLES, require_gpu
from tests.gpu.layouts import Layout
from tests.gpu.worlds import OneRank

require_gpu()

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
LONGEST = (300_000, 600, 70, 24, 12)
needs_graphs = pytest.mark.skipif(ON_DOUBLES, reason="captures a CUDA graph")


def block_of(draw: random.Random) -> tuple[Box, tuple[int, ...]]:
    """Draw a box and the shape of a tensor around it, which may have more than 2^31 cells."""
    dims = draw.randint(1, len(LONGEST))
    extents = [draw.randint(1, LONGEST[dims - 1]) for _ in range(dims)]
    starts = [draw.choice((0, draw.randint(0, 9))) for _ in extents]
    starts[draw.randrange(dims)] += draw.choice((0, 1 << 33))
    stops = [start + extent for start, extent in zip(starts, extents, strict=True)]
    return Box(tuple(starts), tuple(stops)), tuple(stop + draw.randint(0, 3) for stop in stops)


def random_blocks(P_world: Partition, seed: int) -> None:
    draw, device = random.Random(seed), P_world.device
    for number in range(20):
        box, shape = block_of(draw)
        dtype, p = draw.choice(DTYPES), draw.choice((0.001, 0.1, 0.5))
        key, cells = Key(seed, number), Cells(box, shape)
        assert torch.equal(
            draw_kept(key, cells, p, device).cpu(),
            draw_kept(key, cells, p, CPU),
        )
        for by in (uniform_by_index, normal_by_index):
            found = by(key, cells, dtype, device).cpu()
            assert torch.equal(found, by(key, cells, dtype, CPU)), (by, dtype, box, shape)
        layout, values = Layout.drawn(draw, len(shape)), torch.randn(box.shape).to(dtype)
        x, on_gpu = layout.of(values), layout.of(values.to(device))
        leading = draw.randint(1, len(shape))
        leads = Cells.leading(box, shape, leading)
        numbers = Key(torch.tensor(seed, device=device), torch.tensor(number, device=device))
        dropped = drop_by_index(on_gpu, numbers, leads, p)
        assert torch.equal(dropped.cpu(), drop_by_index(x, key, leads, p)), (dtype, x.stride())
        for probability in (x.abs(), p):
            there = on_gpu.abs() if isinstance(probability, torch.Tensor) else p
            ones = bernoulli_by_index(key, cells, dtype, device, there)
            expected = bernoulli_by_index(key, cells, dtype, CPU, probability)
            assert torch.equal(ones.cpu(), expected)


@pytest.mark.parametrize("seed", range(6))
def test_numbers_are_those_of_a_cpu(one_rank: OneRank, seed: int) -> None:
    one_rank.run(random_blocks, seed=seed)


def large_block(P_world: Partition) -> None:
    """More cells than one launch draws, and more bytes than 32 bits count."""
    shape = (3, (1 << 30) + 1000)
    box, ends = Box.whole(shape), ((0, 3000), (shape[1] - 3000, shape[1]))
    key, cells = Key(1, 2), Cells(box, shape)
    kept = draw_kept(key, cells, 0.25, P_world.device)
    drawn = uniform_by_index(key, cells, torch.bfloat16, P_world.device)
    for row in range(3):
        for start, stop in ends:
            part = Box((row, start), (row + 1, stop))
            found = kept[part.slices].cpu(), drawn[part.slices].cpu()
            own = Cells(part, shape)
            assert torch.equal(found[0], draw_kept(key, own, 0.25, CPU))
            expected = uniform_by_index(key, own, torch.bfloat16, CPU)
            assert torch.equal(found[1], expected)


def test_more_cells_than_a_launch_draws(one_rank: OneRank) -> None:
    if ON_DOUBLES or torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs a GPU of 24 GiB")
    one_rank.run(large_block)


def both_ways(function: Any, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = function(x)
    return y, torch.autograd.grad(y, x, g)[0]


def gradients(P_world: Partition) -> None:
    """Backward draws the cells of forward again, also after the layer has been called again."""
    layer = layer_of(P_world)
    x = torch.ones(1000, 7, device=P_world.device, requires_grad=True)
    first, second = layer(x), layer(x)
    for y in (first, second):
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        assert torch.equal(gradient, y)
    assert not torch.equal(first, second)


def layer_of(P_world: Partition) -> Any:
    P_x = P_world.create_cartesian_topology_partition([1, 1])
    return nn.DistributedDropout(P_x, 0.3, seed=5).to(P_world.device)


def test_gradients(one_rank: OneRank) -> None:
    one_rank.run(gradients)


def captured(function: Any, x: torch.Tensor, g: torch.Tensor) -> tuple[Any, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both_ways(function, x, g)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = both_ways(function, x, g)
    return graph, results


def replays_of_a_layer(P_world: Partition) -> None:
    layer = layer_of(P_world)
    x = torch.ones(1000, 7, device=P_world.device, requires_grad=True)
    g = torch.ones_like(x)  # replays read it
    graph, (y, gradient) = captured(layer, x, g)
    for call in range(1, 4):
        graph.replay()
        cells, ones = Cells(Box.whole(x.shape), tuple(x.shape)), torch.ones(1000, 7)
        expected = drop_by_index(ones, Key(5, call), cells, 0.3)
        assert torch.equal(y.cpu(), expected) and torch.equal(gradient.cpu(), expected)
    # Eager calls go on with the next number.
    assert int(layer.calls) == 4 and not torch.equal(layer(x), y)


@needs_graphs
def test_replays_of_a_layer_draw_anew(one_rank: OneRank) -> None:
    one_rank.run(replays_of_a_layer)


def replays_of_a_network(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 1])
    network: Any = gpudist.distribute(
        torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Dropout(0.3)), P_x
    ).to(P_world.device)
    x = torch.ones(1000, 7, device=P_world.device, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        return network(x).to_local()

    g = torch.ones_like(x)  # replays read it
    graph, (y, gradient) = captured(call, x, g)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, gradient)
        assert all(not torch.equal(y, other) for other in seen)
        share = float((y == 0).double().mean())
        assert abs(share - 0.51) < 0.05
        seen.append(y.clone())
    assert all(not torch.equal(call(x), other) for other in seen)


@needs_graphs
def test_replays_of_a_network_draw_anew(one_rank: OneRank) -> None:
    one_rank.run(replays_of_a_network)


def numbers_on_the_host(P_world: Partition) -> None:
    layer = layer_of(P_world).cpu()
    x = torch.ones(10, 7, device=P_world.device, requires_grad=True)
    layer(x)
    with pytest.raises(GpudistError, match="move the layer to cuda"):
        captured(layer, x, torch.ones_like(x))


@needs_graphs
def test_a_layer_whose_numbers_are_on_the_host_is_not_captured(one_rank: OneRank) -> None:
    one_rank.run(numbers_on_the_host)
