"""Torch's data parallelism over the batch axis, around layers cut along the other axes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import gpudist
from gpudist import nn
from gpudist.errors import PartitionError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.nn.parameters.replicated_cases import network, sequential_network
from tests.pool import distributed
from tests.torchs_group import torchs_group

STEPS = 5
TOLERANCE = 1e-9


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def ddp(net: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    nn.fuse_parameter_movements(net)
    return torch.nn.parallel.DistributedDataParallel(net, process_group=mesh.get_group())


def ddp_of_a_frozen_layer(net: Any, mesh: Any) -> torch.nn.Module:
    net[0].requires_grad_(False)
    return ddp(net, mesh)


def fsdp(net: Any, mesh: Any) -> Any:
    nn.fuse_parameter_movements(net)
    return fully_shard(net, mesh=mesh)


def ddp_converted(net: Any, mesh: Any) -> torch.nn.Module:
    """Wrap a network whose parameters already move together."""
    return torch.nn.parallel.DistributedDataParallel(net, process_group=mesh.get_group())


def fsdp_of_every_layer(net: Any, mesh: Any) -> Any:
    """Each frees its whole parameters behind its forward, and sums its own gradients."""
    for layer in (net[0], net[3]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(net, mesh=mesh)


def fsdp_converted(net: Any, mesh: Any) -> Any:
    return fully_shard(net, mesh=mesh)


def fsdp_of_every_layer_converted(net: Any, mesh: Any) -> Any:
    return fsdp_of_every_layer(net, mesh)


WRAPPERS = {
    f.__name__: f
    for f in (
        ddp, ddp_of_a_frozen_layer, ddp_converted, fsdp, fsdp_of_every_layer, fsdp_converted,
        fsdp_of_every_layer_converted,
    )
}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
@distributed(ranks=4, transports=["host", "gloo"])
def test_trains_as_alone(P_world: Partition, wrapper: str, store_path: str) -> None:
    """Two rows of the batch, each cut in two blocks; the losses of rows have a mean."""
    P_x = grid(P_world, [2, 1, 2, 1])
    P_row = P_x.along([1, 2, 3])
    with torchs_group(P_world, store_path):
        mesh: Any = P_x.create_device_mesh([0])
        alone = without_batch_norm(sequential_network())
        if wrapper.endswith("converted"):
            net = gpudist.distribute(copy.deepcopy(alone), P_row)
        else:
            net = without_batch_norm(network(P_row, fused=False))
        model = WRAPPERS[wrapper](net, mesh)
        if wrapper == "ddp_of_a_frozen_layer":
            alone[0].requires_grad_(False)
        train(model, alone, P_x, nn.DistributedMSELoss(P_row, P_loss=P_row))
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            whole: Any = found
            if isinstance(whole, DTensor):
                assert whole.to_local().numel() < whole.numel()
                whole = whole.full_tensor()
            assert_equal_to(whole.detach(), expected.detach(), TOLERANCE, "parameter")


@distributed(ranks=4, transports=["host"])
def test_other_sharded_parameters_of_a_converted_network_are_refused(
    P_world: Partition, store_path: str
) -> None:
    P_x = grid(P_world, [2, 1, 2, 1])
    with torchs_group(P_world, store_path):
        mesh: Any = P_x.create_device_mesh([0])
        net = gpudist.distribute(torch.nn.Conv2d(2, 4, 3), P_x.along([1, 2, 3]))
        net.weight = torch.nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(gpudist.ConversionError, match="that fully_shard did not make"):
            net(torch.ones(2, 2, 5, 6))


def without_batch_norm(net: Any) -> Any:
    """Remove batch norm, whose statistics would be those of a row."""
    net[2] = torch.nn.Tanh()
    return net


def train(
    model: torch.nn.Module, alone: torch.nn.Module, P_x: CartesianPartition, loss_of: Any
) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    for step in range(STEPS):
        x, target = random_like_all((4, 2, 9, 6), step), random_like_all((4, 2, 4, 2), step + 9)
        blocks = [own_block(whole, P_x, requires_grad=False) for whole in (x, target)]
        y: Any = model(blocks[0])
        y = y.to_local() if isinstance(y, gpudist.GlobalTensor) else y
        loss, expected = loss_of(y, blocks[1]), (alone(x) - target).square().mean()
        losses = torch.stack([loss, expected.detach()])
        # Rows have losses of their own, of which data parallelism takes the mean.
        dist.all_reduce(losses)
        assert_equal_to(losses[0] / P_x.size, expected.detach(), TOLERANCE, "loss")
        for optimizer, value in zip(optimizers, (loss, expected), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()


@distributed(ranks=4, transports=["host"])
def test_mesh_has_the_partitions_workers(P_world: Partition, store_path: str) -> None:
    P_x = grid(P_world, [2, 1, 2], [0, 2, 1, 3])
    with torchs_group(P_world, store_path):
        for axes, names in (([0], None), ([-1], ["width"]), ([2, 0], ["width", "batch"])):
            mesh: Any = P_x.create_device_mesh(axes, names)
            assert mesh.mesh_dim_names == (None if names is None else tuple(names))
            assert P_x.index is not None
            assert list(mesh.get_coordinate()) == [P_x.index[axis] for axis in axes]
            assert mesh.mesh.shape == tuple(P_x.shape[axis] for axis in axes)
            for dim, axis in enumerate(axes):
                members = dist.get_process_group_ranks(mesh.get_group(dim))
                assert tuple(members) == P_x.along([axis]).ranks


@distributed(ranks=3, transports=["host"])
def test_workers_outside_have_no_mesh(P_world: Partition, store_path: str) -> None:
    with torchs_group(P_world, store_path):
        mesh = grid(P_world, [2, 1]).create_device_mesh([0])
        assert (mesh is None) == (P_world.rank == 2)


@distributed(ranks=2, transports=["host"])
def test_meshes_that_cannot_be_are_refused(P_world: Partition, store_path: str) -> None:
    P_x = grid(P_world, [2, 1])
    with pytest.raises(PartitionError, match="init_process_group"):
        P_x.create_device_mesh([0])
    with pytest.raises(PartitionError, match="out of range"):
        P_x.create_device_mesh([2])
    with pytest.raises(PartitionError, match="a name each"):
        P_x.create_device_mesh([0, 1])
    with pytest.raises(PartitionError, match="a name each"):
        P_x.create_device_mesh([0], ["batch", "width"])
    with pytest.raises(PartitionError, match=r"along axis 0 .* \[1, 0\] are not ascending"):
        grid(P_world, [2, 1], [1, 0]).create_device_mesh([0])
    assert P_world.rank is not None
    reverse = 1 - P_world.rank
    with (
        torchs_group(P_world, store_path, reverse),
        pytest.raises(PartitionError, match=f"rank {P_world.rank} of 2 .* rank {reverse} of"),
    ):
        P_x.create_device_mesh([0])
