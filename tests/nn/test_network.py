"""A network trained over a grid of workers takes the steps of the sequential one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpudist.nn import (
    Broadcast,
    DistributedAvgPool2d,
    DistributedBatchNorm,
    DistributedConv2d,
    DistributedCrossEntropyLoss,
    DistributedLinear,
    DistributedMaxPool2d,
    Repartition,
    SumReduce,
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


@distributed(ranks=4, transports=("loopback", "host"))
def test_sizes_of_split_dims_change(P_world: Partition) -> None:
    """Layers with ``shape="dynamic"`` take another image at every call."""
    P_x = grid(P_world, [1, 1, 2, 2])
    torch.manual_seed(1)
    reference = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, 2, 1, 2, dtype=F64),
        torch.nn.BatchNorm2d(3, dtype=F64),
        torch.nn.AvgPool2d(2, 1),
    )
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        DistributedConv2d(P_x, 2, 3, 3, 2, 1, 2, dtype=F64, shape="dynamic"),
        DistributedBatchNorm(P_x, 3, dtype=F64, shape="dynamic"),
        DistributedAvgPool2d(P_x, 2, 1, shape="dynamic"),
    )
    for shape in ((2, 2, 13, 17), (1, 2, 12, 9), (3, 2, 11, 20)):
        whole = random_like_all(shape, 1)
        torch.testing.assert_close(network(own_block(whole, P_x)), own_block(reference(whole), P_x))


MODES = 4


class SpectralConv(torch.nn.Module):
    """Product with a weight for each of the lowest frequencies of the last dim.

    Blocks of ``P_x`` are cut again before each transform, so that its dim is whole; the weight
    belongs to the first worker.
    """

    def __init__(self, P_world: Partition, P_x: CartesianPartition, weight: torch.Tensor) -> None:
        super().__init__()
        P_0, P_rows = grid(P_world, [1, 1, 1, 1]), grid(P_world, [1, 1, 4, 1])
        P_columns = grid(P_world, [1, 1, 1, 4])
        self.P_columns, self.share = P_columns, Broadcast(P_0, P_columns)
        self.to_rows, self.to_space = Repartition(P_x, P_rows), Repartition(P_rows, P_x)
        self.to_columns, self.back = Repartition(P_rows, P_columns), Repartition(P_columns, P_rows)
        self.weight = torch.nn.Parameter(weight.clone() if P_0.active else weight.new_empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.to_rows(x)
        f = torch.fft.fft(self.to_columns(torch.fft.rfft(rows, dim=3)), dim=2)
        weight = self.share(self.weight)
        own = own_slices((1, 1, 1, 12 // 2 + 1), self.P_columns)
        assert own is not None
        weight = weight[..., own[3]]
        n = weight.shape[-1]
        kept = torch.zeros_like(f)
        kept[..., :n] = torch.einsum("bxhw,xyhw->byhw", f[..., :n], weight)
        spectrum = self.back(torch.fft.ifft(kept, dim=2))
        return self.to_space(torch.fft.irfft(spectrum, n=12, dim=3))


@distributed(ranks=5, transports=("loopback", "host"))
def test_spectral_network(P_world: Partition) -> None:
    """Repartitions of complex blocks, and a relative error summed on one worker.

    The worker outside all partitions does not take part.
    """
    P_x, P_0 = grid(P_world, [1, 1, 2, 2]), grid(P_world, [1, 1, 1, 1])
    if not P_x.active:
        return
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3, 3, 10, MODES, dtype=torch.complex128, generator=generator)
    network, total = SpectralConv(P_world, P_x, weight), SumReduce(P_x, P_0)
    for batch in (3, 2):
        whole, target = random_like_all((2, batch, 3, 10, 12), 1).unbind()
        whole.requires_grad_()
        expected_weight = weight.clone().requires_grad_()
        f = torch.fft.fft(torch.fft.rfft(whole, dim=3), dim=2)
        kept = torch.zeros_like(f)
        kept[..., :MODES] = torch.einsum("bxhw,xyhw->byhw", f[..., :MODES], expected_weight)
        expected = torch.fft.irfft(torch.fft.ifft(kept, dim=2), n=12, dim=3)
        error = (expected - target).flatten(1).square().sum(1)
        (error.sqrt() / target.flatten(1).norm(dim=1)).mean().backward()

        x = own_block(whole, P_x)
        y = network(x)
        torch.testing.assert_close(y, own_block(expected, P_x))
        parts = (y - own_block(target, P_x, requires_grad=False)).flatten(1).square().sum(1)
        found = total(parts)
        if P_0.active:
            torch.testing.assert_close(found, error)
            found = (found.sqrt() / target.flatten(1).norm(dim=1)).mean()
        network.zero_grad()
        found.sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(x.grad, own_block(whole.grad, P_x, requires_grad=False))
        if P_0.active:
            torch.testing.assert_close(network.weight.grad, expected_weight.grad)
