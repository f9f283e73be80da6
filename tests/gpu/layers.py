"""Bodies that train distributed layers on the device of their world, from data of whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpudist import capture, nn
from gpudist.world.partition import Partition
from tests.gpu.operators import Given, grid_of, integers, on_cpu, on_grid
from tests.ops.dense import local_input, partition_of


def factory(P_world: Partition) -> dict[str, Any]:
    return {"device": P_world.device, "dtype": torch.float64}


def conv1d(P_world: Partition) -> Given:
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size])
    layer = nn.DistributedConv1d(P_x, 2, 3, 3, 2, 2, 2, **factory(P_world))
    return Given(layer, local_input(integers((2, 2, 19)), P_x))


def conv2d(P_world: Partition, extent: int = 9) -> Given:
    P_x = on_grid(P_world, [1, 1])
    layer = nn.DistributedConv2d(P_x, 2, 3, 3, padding=1, **factory(P_world))
    return Given(layer, local_input(integers((2, 2, extent, extent + 1)), P_x))


def conv3d(P_world: Partition) -> Given:
    P_x = on_grid(P_world, [1, 1, 1])
    layer = nn.DistributedConv3d(
        P_x, 1, 2, 3, padding=1, padding_mode="circular", **factory(P_world)
    )
    return Given(layer, local_input(integers((1, 1, 4, 5, 6)), P_x))


def conv_of_channels(P_world: Partition, inputs: bool) -> Given:
    split, whole = [1, P_world.size, 1, 1], [1, 1, 1, 1]
    P_split = P_world.create_cartesian_topology_partition(split)
    P_whole = partition_of(P_world, [P_world.size - 1], whole)
    P_x, P_y = (P_split, P_whole) if inputs else (P_whole, P_split)
    P_w = P_world.create_cartesian_topology_partition([P_y.shape[1], P_x.shape[1], 1, 1])
    channels = 2 * P_world.size
    layer = nn.DistributedConv2d(
        P_x, P_y, P_w, channels, channels, 3, padding=1, **factory(P_world)
    )
    return Given(layer, local_input(integers((2, channels, 5, 5)), P_x))


def max_pool(P_world: Partition) -> Given:
    P_x = on_grid(P_world, [1, 1])
    layer = nn.DistributedMaxPool2d(P_x, 3, 2, 1)
    return Given(layer, local_input(permuted((2, 2, 9, 10)), P_x))


def avg_pool(P_world: Partition) -> Given:
    P_x = on_grid(P_world, [1, 1])
    layer = nn.DistributedAvgPool2d(P_x, 2, 2, 1)
    return Given(layer, local_input(integers((2, 2, 9, 10)), P_x))


def linear(P_world: Partition) -> Given:
    P_x = P_world.create_cartesian_topology_partition([P_world.size, 1])
    layer = nn.DistributedLinear(P_x, 6, 5, **factory(P_world))
    return Given(layer, local_input(integers((7, 6)), P_x))


def linear_of_features(P_world: Partition) -> Given:
    rows, columns = grid_of(P_world.size)
    P_x = partition_of(P_world, range(columns), [1, columns])
    P_y = partition_of(P_world, range(P_world.size)[-rows:], [1, rows])
    P_w = P_world.create_cartesian_topology_partition([rows, columns])
    features = 2 * P_world.size + 1
    layer = nn.DistributedLinear(P_x, P_y, P_w, features, features + 1, **factory(P_world))
    return Given(layer, local_input(integers((3, features)), P_x))


class Loss(torch.nn.Module):
    """A loss with its target, as a layer of one input."""

    def __init__(self, loss: torch.nn.Module, target: torch.Tensor) -> None:
        super().__init__()
        self.loss, self.target = loss, target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x, self.target)


def cross_entropy(P_world: Partition) -> Given:
    P_x = on_grid(P_world)
    target = torch.arange(5).tensor_split(P_x.shape[0])[(P_x.index or (0,))[0]]
    loss = nn.DistributedCrossEntropyLoss(P_x)
    return Given(Loss(loss, target.to(P_world.device)), local_input(integers((5, 7)), P_x))


def element_loss(P_world: Partition, make: Callable[..., torch.nn.Module]) -> Given:
    P_x = on_grid(P_world)
    target = local_input(integers((5, 7), 1), P_x).to(P_world.device)
    return Given(Loss(make(P_x), target), local_input(integers((5, 7)), P_x))


def permuted(shape: tuple[int, ...]) -> torch.Tensor:
    """Different numbers: a maximum of equal ones could be any of them."""
    cells = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(cells, generator=generator).reshape(shape).double()


LAYERS: dict[str, Callable[[Partition], Given]] = {
    "conv1d, strided and dilated": conv1d,
    "conv2d": conv2d,
    "conv2d, of a large block": partial(conv2d, extent=720),
    "conv3d, circular": conv3d,
    "conv2d, input channels": partial(conv_of_channels, inputs=True),
    "conv2d, output channels": partial(conv_of_channels, inputs=False),
    "max pool": max_pool,
    "average pool": avg_pool,
    "linear": linear,
    "linear, split features": linear_of_features,
    "cross-entropy": cross_entropy,
    "mse": partial(element_loss, make=nn.DistributedMSELoss),
    "l1": partial(element_loss, make=nn.DistributedL1Loss),
}


def fill(layer: torch.nn.Module, rank: int) -> None:
    """Give each parameter's block on this rank whole numbers."""
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(integers(parameter.shape, 1000 * rank + number))


def layer_and_gradients(P_world: Partition, case: str) -> dict[str, torch.Tensor]:
    layer, x = LAYERS[case](P_world)
    assert isinstance(layer, torch.nn.Module)
    rank = P_world.rank or 0
    fill(layer, rank)
    x = x.to(P_world.device).requires_grad_()
    y = layer(x)
    # A loss has the same value on all ranks, and so has its gradient.
    y.backward(integers(y.shape, 100 + rank).to(y.device) if y.dim() else torch.full_like(y, 3.0))
    assert x.grad is not None
    results = {"y": y, "gradient of x": x.grad}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad
    return on_cpu(**results)


def trained(P_world: Partition, steps: int, as_a_graph: bool = False) -> dict[str, torch.Tensor]:
    """Return a small network after some steps of gradient descent, and the loss before each.

    ``as_a_graph``: each but the first two is a replay of one CUDA graph of a whole step.
    """
    P_x = on_grid(P_world, [1, 1])
    P_rows = P_world.create_cartesian_topology_partition([P_world.size, 1, 1, 1])
    P_flat = P_world.create_cartesian_topology_partition([P_world.size, 1])
    given = factory(P_world)
    network = torch.nn.Sequential(
        nn.DistributedConv2d(P_x, 1, 4, 3, padding=1, **given),
        torch.nn.Tanh(),
        nn.DistributedAvgPool2d(P_x, 2),
        nn.DistributedConv2d(P_x, 4, 2, 3, padding=1, **given),
        torch.nn.Tanh(),
        nn.Repartition(P_x, P_rows),
        torch.nn.Flatten(),
        nn.DistributedLinear(P_flat, 2 * 6 * 6, 5, **given),
    )
    fill(network, P_world.rank or 0)
    criterion = nn.DistributedCrossEntropyLoss(P_flat)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    x = local_input(integers((8, 1, 12, 12)), P_x).to(P_world.device)
    target = (torch.arange(8) % 5).tensor_split(P_world.size)[P_world.rank or 0]
    target = target.to(P_world.device)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(network(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    take = capture(step, P_world=P_world) if as_a_graph else step
    losses = [take(x if turn % 2 else x.flip(2), target) for turn in range(steps)]
    return on_cpu(losses=torch.stack(losses), **dict(network.named_parameters()))
