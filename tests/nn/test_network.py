"""A network trained over a grid of workers takes the steps of the sequential one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpudist.nn import (
    DistributedConv2d,
    DistributedCrossEntropyLoss,
    DistributedLinear,
    DistributedMaxPool2d,
    Repartition,
)
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import grid, own_block, own_slices, random_like_all
from tests.pool import distributed

F64 = torch.float64
BATCHES = (6, 6, 3, 6, 6, 3, 6, 6, 3, 6)


def sequential_network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1, dtype=F64),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(4, 6, 3, dtype=F64),
        torch.nn.Identity(),
        torch.nn.Flatten(),
        torch.nn.Linear(6 * 3 * 2, 5, dtype=F64),
    )


def distributed_network(
    P_x: CartesianPartition,
    P_flat: CartesianPartition,
    make_linear: Callable[[], torch.nn.Module],
) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        DistributedConv2d(P_x, 2, 4, 3, padding=1, dtype=F64),
        torch.nn.ReLU(inplace=True),
        DistributedMaxPool2d(P_x, 2),
        DistributedConv2d(P_x, 4, 6, 3, dtype=F64),
        Repartition(P_x, P_flat),
        torch.nn.Flatten(),
        make_linear(),
    )


@pytest.mark.parametrize("head", ["batch", "features"])
@distributed(ranks=5)
def test_training(P_world: Partition, head: str) -> None:
    """Ten steps of Adam, smaller batches among them; rank 4 has no part in the network."""
    P_x = grid(P_world, [1, 1, 2, 2], [3, 1, 2, 0])
    if head == "batch":
        P_flat, P_y = grid(P_world, [4, 1, 1, 1]), grid(P_world, [4, 1])

        def make_linear() -> torch.nn.Module:
            return DistributedLinear(P_y, 36, 5, dtype=F64)
    else:
        P_flat, P_y = grid(P_world, [1, 2, 1, 1], [1, 2]), grid(P_world, [1, 2], [3, 0])

        def make_linear() -> torch.nn.Module:
            P_in, P_w = grid(P_world, [1, 2], [1, 2]), grid(P_world, [2, 2])
            return DistributedLinear(P_in, P_y, P_w, 36, 5, dtype=F64)

    torch.manual_seed(1)
    reference = sequential_network()
    torch.manual_seed(1)
    network = distributed_network(P_x, P_flat, make_linear)
    criterion, reference_criterion = DistributedCrossEntropyLoss(P_y), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=1e-2)
    values: list[float] = []
    for step, batch in enumerate(BATCHES):
        whole = random_like_all((batch, 2, 10, 9), step % 4)
        target = torch.arange(batch) % 5
        expected = reference_criterion(reference(whole), target)
        where = own_slices((batch, 5), P_y)
        logits = network(own_block(whole, P_x))
        value = criterion(logits, target[:0] if where is None else target[where[0]])
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
        values.append(expected.item())
        for loss, steps in ((expected, reference_optimizer), (value, optimizer)):
            steps.zero_grad()
            loss.backward()
            steps.step()
    assert min(values[4:]) < 0.9 * values[0]
