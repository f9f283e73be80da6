"""Programs in the manner of DistDL's users: only their imports name gpudist."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import gpudist.compat.distdl as distdl
from gpudist.compat.distdl import nn as dnn
from gpudist.compat.distdl.backends.mpi.partition import MPIPartition
from gpudist.compat.distdl.functional import ZeroVolumeCorrectorFunction
from gpudist.compat.distdl.utilities.slicing import assemble_slices
from gpudist.compat.distdl.utilities.tensor_decomposition import (
    compute_subtensor_shapes_balanced,
    compute_subtensor_start_indices,
    compute_subtensor_stop_indices,
)
from gpudist.compat.distdl.utilities.torch import TensorStructure, zero_volume_tensor
from gpudist.world.partition import Partition
from tests.pool import distributed


class Output(dnn.Module):
    """Last layer: the classes on rank 0, and a number elsewhere, so that backward can start."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ZeroVolumeCorrectorFunction.apply(input)


def sequential_lenet() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 5, padding=2), torch.nn.ReLU(), torch.nn.MaxPool2d(2, 2),
        torch.nn.Conv2d(6, 16, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2, 2),
        torch.nn.Flatten(),
        torch.nn.Linear(400, 120), torch.nn.ReLU(),
        torch.nn.Linear(120, 84), torch.nn.ReLU(),
        torch.nn.Linear(84, 10), torch.nn.Sigmoid(),
    ).double()  # fmt: skip


def distributed_lenet(P_world: Any) -> tuple[Any, torch.nn.Module]:
    """Return the partition and the network of the paper: space is split, then features."""
    P_world._comm.Barrier()
    P_base = P_world.create_partition_inclusive(np.arange(4))
    P_0 = P_base.create_partition_inclusive([0])
    P_root = P_0.create_cartesian_topology_partition([1, 1, 1, 1])
    P_root_2d = P_0.create_cartesian_topology_partition([1, 1])
    P_low, P_high = (P_base.create_partition_inclusive(np.arange(a, a + 2)) for a in (0, 2))
    P_space = P_base.create_cartesian_topology_partition([1, 1, 2, 2])
    P_flat = P_base.create_cartesian_topology_partition([1, 4, 1, 1])
    P_flat_2d = P_base.create_cartesian_topology_partition([1, 4])
    P_in = P_low.create_cartesian_topology_partition([1, 2])
    P_out = P_high.create_cartesian_topology_partition([1, 2])
    P_matrix = P_base.create_cartesian_topology_partition([2, 2])
    torch.manual_seed(2)
    convolutions: dict[str, Any] = dict(kernel_size=(5, 5))
    pools: dict[str, Any] = dict(kernel_size=(2, 2), stride=(2, 2))
    net = torch.nn.Sequential(
        dnn.DistributedTranspose(P_root, P_space),
        dnn.DistributedConv2d(
            P_space, in_channels=1, out_channels=6, padding=(2, 2), **convolutions
        ),
        torch.nn.ReLU(),
        dnn.DistributedMaxPool2d(P_space, **pools),
        dnn.DistributedConv2d(P_space, in_channels=6, out_channels=16, **convolutions),
        torch.nn.ReLU(inplace=True),
        dnn.DistributedMaxPool2d(P_space, **pools),
        dnn.DistributedTranspose(P_space, P_flat),
        torch.nn.Flatten(),
        dnn.DistributedTranspose(P_flat_2d, P_in),
        dnn.DistributedLinear(P_in, P_out, P_matrix, 400, 120),
        torch.nn.ReLU(),
        # Back and forth, which saves a repartition.
        dnn.DistributedLinear(P_out, P_in, P_matrix, 120, 84),
        torch.nn.ReLU(),
        dnn.DistributedLinear(P_in, P_out, P_matrix, 84, 10),
        dnn.DistributedTranspose(P_out, P_root_2d),
        torch.nn.Sigmoid(),
        Output(),
    )
    P_0.deactivate()
    return P_base, net.double()


@distributed(ranks=5, transports=("loopback", "host"))
def test_lenet(P_world: Partition) -> None:
    P_base, net = distributed_lenet(distdl.backend.backend.Partition(P_world))
    sequential = sequential_lenet()
    criterion = torch.nn.CrossEntropyLoss()
    optimizers = [torch.optim.Adam(n.parameters(), lr=1e-2) for n in (net, sequential)]
    torch.manual_seed(4)
    # The last batch is shorter.
    for batch in (6, 6, 4):
        images = torch.randn(batch, 1, 28, 28, dtype=torch.float64)
        labels = torch.randint(10, (batch,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = net(images if P_base.rank == 0 else zero_volume_tensor(batch, torch.float64))
        expected = criterion(sequential(images), labels)
        loss = output.clone()
        if P_base.rank == 0:
            loss = criterion(output, labels)
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        if P_base.active:
            loss.backward()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()


class SpectralConv(torch.nn.Module):
    """Product with a weight for each of the lowest and highest frequencies, on blocks of them."""

    def __init__(self, P_x: Any, weight: torch.Tensor, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = P_x.shape.copy()
        shape[2], shape[3] = 1, P_x.shape[2] * P_x.shape[3]
        self.P_rows = P_x.create_cartesian_topology_partition(shape)
        shape[2], shape[3] = shape[3], 1
        self.P_columns = P_x.create_cartesian_topology_partition(shape)
        # Space, columns whole, rows whole, and back.
        self.to_columns = dnn.DistributedTranspose(P_x, self.P_columns)
        self.to_rows = dnn.DistributedTranspose(self.P_columns, self.P_rows)
        self.from_rows = dnn.DistributedTranspose(self.P_rows, self.P_columns)
        self.to_space = dnn.DistributedTranspose(self.P_columns, P_x)
        self.whole, self.weight = weight, torch.nn.UninitializedParameter(dtype=weight.dtype)  # type: ignore[call-arg]
        self.cells: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Along rows, dim 2 is whole on each worker; along columns dim 3.
        f = torch.fft.fft(self.to_rows(torch.fft.rfft(self.to_columns(x), dim=3)), dim=2)
        if self.cells is None:
            self.find_cells(f)
        g = torch.zeros_like(f)
        g[self.cells] = torch.einsum("bxhw,xyhw->byhw", f[self.cells], self.weight)
        return self.to_space(torch.fft.irfft(self.from_rows(torch.fft.ifft(g, dim=2)), dim=3))

    @torch.no_grad()
    def find_cells(self, f: torch.Tensor) -> None:
        P = self.P_rows
        known = distdl.backend.backend.assemble_global_tensor_structure(TensorStructure(f), P)
        shapes = compute_subtensor_shapes_balanced(known, P.shape)
        index = tuple(P.index)
        start = compute_subtensor_start_indices(shapes)[index]
        stop = np.minimum(compute_subtensor_stop_indices(shapes)[index][3], self.modes)
        wide = slice(0, max(stop - start[3], 0))
        self.cells = (slice(None), slice(None), slice(None), wide)
        block = self.whole[..., start[3] : start[3] + wide.stop]
        self.weight.materialize(tuple(block.shape))
        self.weight.copy_(block)


class Pointwise(torch.nn.Module):
    """Product of the channels with a matrix, plus a bias, which rank 0 owns."""

    def __init__(self, P_x: Any, matrix: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        base = P_x.create_partition_inclusive([0])
        P_0 = base.create_cartesian_topology_partition([1] * P_x.dim)
        self.moves = torch.nn.ModuleList([dnn.Broadcast(P_0, P_x), dnn.Broadcast(P_0, P_x)])
        given = (matrix, bias) if P_0.active else (zero_volume_tensor(), zero_volume_tensor())
        self.matrix, self.bias = (torch.nn.Parameter(p.double().clone()) for p in given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix, bias = (
            move(p) for move, p in zip(self.moves, (self.matrix, self.bias), strict=True)
        )
        return torch.einsum("bxhw,xy->byhw", x, matrix) + bias


class RelativeLoss(torch.nn.Module):
    """Norm of the difference over that of the target, for each sample, on rank 0."""

    def __init__(self, P_x: Any) -> None:
        super().__init__()
        base = P_x.create_partition_inclusive([0])
        self.P_0 = base.create_cartesian_topology_partition([1] * P_x.dim)
        self.sums = torch.nn.ModuleList([dnn.SumReduce(P_x, self.P_0) for _ in range(2)])

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        parts = ((y - target).flatten(1) ** 2, target.flatten(1) ** 2)
        above, below = (total(p.sum(1)) for total, p in zip(self.sums, parts, strict=True))
        ratio = (above**0.5 / below**0.5).mean() if self.P_0.active else above
        return ZeroVolumeCorrectorFunction.apply(ratio)


WIDTH, MODES = 3, 4


def weights_of_fourier_network(rows: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    return (
        torch.randn(1, WIDTH).double(), torch.randn(1, WIDTH, 1, 1).double(),
        torch.randn(WIDTH, WIDTH, rows, MODES, dtype=torch.complex128) / 9,
        torch.randn(WIDTH, 1).double(), torch.randn(1, 1, 1, 1).double(),
    )  # fmt: skip


@distributed(ranks=5, transports=("loopback", "host"))
def test_fourier_network(P_world: Partition) -> None:
    """A Fourier neural operator: repartitions between transforms, of complex blocks."""
    P = MPIPartition(P_world)
    P_base = P.create_partition_inclusive(np.arange(np.prod((1, 1, 2, 2))))
    P_x = P_base.create_cartesian_topology_partition((1, 1, 2, 2))
    if not P_x.active:
        return
    matrix_in, bias_in, spectral, matrix_out, bias_out = weights_of_fourier_network(10)
    lift = Pointwise(P_x, matrix_in, bias_in)
    mix, drop = SpectralConv(P_x, spectral, MODES), Pointwise(P_x, matrix_out, bias_out)
    norm, criterion = dnn.DistributedBatchNorm(P_x, WIDTH).double(), RelativeLoss(P_x)
    same = [
        w.clone().requires_grad_() for w in (matrix_in, bias_in, spectral, matrix_out, bias_out)
    ]
    same_norm = torch.nn.BatchNorm2d(WIDTH).double()
    torch.manual_seed(8)
    for batch in (3, 2):
        image, target = torch.randn(2, batch, 1, 10, 12, dtype=torch.float64)
        structure = TensorStructure(image)
        shapes = compute_subtensor_shapes_balanced(structure, P_x.shape)
        index = tuple(P_x.index)
        cells = assemble_slices(
            compute_subtensor_start_indices(shapes)[index],
            compute_subtensor_stop_indices(shapes)[index],
        )
        x = image[cells].clone().requires_grad_()
        h = norm(lift(x))
        y = drop(F.gelu(mix(h) + h))
        loss = criterion(y, target[cells])
        loss.backward()

        whole = image.clone().requires_grad_()
        h = same_norm(torch.einsum("bxhw,xy->byhw", whole, same[0]) + same[1])
        f = torch.fft.rfft2(h)
        g = torch.zeros_like(f)
        g[..., :MODES] = torch.einsum("bxhw,xyhw->byhw", f[..., :MODES], same[2])
        y_whole = torch.einsum("bxhw,xy->byhw", F.gelu(torch.fft.irfft2(g) + h), same[3]) + same[4]
        difference = (y_whole - target).flatten(1).norm(dim=1)
        expected = (difference / target.flatten(1).norm(dim=1)).mean()
        expected.backward()

        torch.testing.assert_close(y, y_whole[cells])
        assert x.grad is not None and whole.grad is not None
        torch.testing.assert_close(x.grad, whole.grad[cells])
        if P_x.rank == 0:
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(lift.matrix.grad, same[0].grad)
            torch.testing.assert_close(drop.bias.grad, same[4].grad)
        assert same[2].grad is not None
        start = compute_subtensor_start_indices(
            compute_subtensor_shapes_balanced(TensorStructure(f), mix.P_rows.shape)
        )[tuple(mix.P_rows.index)][3]
        part = same[2].grad[..., start : start + mix.weight.shape[-1]]
        torch.testing.assert_close(mix.weight.grad, part)
        for module in (lift, mix, drop, norm, same_norm):
            module.zero_grad()
        for weight in same:
            weight.grad = None
