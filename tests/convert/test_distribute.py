"""Networks as their authors write them compute the same over blocks of their input."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from gpudist import distribute, plan_of, sequential
from gpudist.errors import PartitionError
from gpudist.world.partition import Partition
from tests.convert.networks import NETWORKS
from tests.convert.training import assert_as_alone, assert_whole
from tests.nn.compare import grid, own_block, random_like_all
from tests.pool import distributed

CASES = [(name, shape) for name, (_, _, shapes) in NETWORKS.items() for shape in shapes]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
@distributed(ranks=5, transports=["loopback"], timeout_s=120)
def test_trains_as_alone(P_world: Partition, name: str, shape: Sequence[int]) -> None:
    """Some ranks have no part in the network."""
    make, input_shape, _ = NETWORKS[name]
    assert_as_alone(make, grid(P_world, shape), [input_shape])


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@distributed(ranks=4, transports=["host", "gloo", "nccl"], timeout_s=120)
def test_trains_as_alone_in_processes(P_world: Partition, replicate: bool) -> None:
    make, input_shape, _ = NETWORKS["unet"]
    P_x = grid(P_world, [1, 1, 1, 2, 2])
    assert_as_alone(make, P_x, [input_shape], replicate_parameters=replicate)


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@distributed(ranks=3, transports=["loopback"], timeout_s=120)
def test_trains_by_adam(P_world: Partition, replicate: bool) -> None:
    """Over an uneven cut, and with parameters that one worker holds."""
    make, input_shape, _ = NETWORKS["video"]
    P_x = grid(P_world, [1, 1, 1, 3, 1])
    assert_as_alone(
        make, P_x, [input_shape], steps=3, optimizer_of=torch.optim.AdamW,
        replicate_parameters=replicate,
    )  # fmt: skip


@distributed(ranks=3, transports=["loopback"])
def test_partition_by_its_shape_or_mesh(P_world: Partition) -> None:
    network, x = torch.nn.Conv2d(1, 1, 3, padding=1), torch.ones(1, 1, 4, 8)
    of_shape: Any = distribute(copy.deepcopy(network), (1, 1, 2, 1))
    assert of_shape.P_x == P_world.grid(1, 1, 2, 1)
    mesh = DeviceMesh("cpu", [[[[1], [2]]]], _init_backend=False, _rank=P_world.rank)
    assert distribute(copy.deepcopy(network), mesh).P_x == P_world.create_mesh_partition(mesh)
    assert (
        plan_of(network, mesh, (1, 1, 8, 8)).rows
        == plan_of(network, (1, 1, 2, 1), (1, 1, 8, 8)).rows
    )
    for P_x, reason in (
        ([1, 1, 2, 2], "holds 4 workers but the partition has 3; start 4 processes"),
        (
            2,
            r"P_x is 2 \(int\); it takes a CartesianPartition or a DeviceMesh or a sequence of int",
        ),
    ):
        with pytest.raises(PartitionError, match=reason):
            distribute(network, P_x)  # pyright: ignore[reportArgumentType]
    assert of_shape(x if of_shape.P_x.active else x[:0]).shape == (1, 1, 8, 8)


@distributed(ranks=3, transports=["loopback"])
def test_workers_without_a_cell(P_world: Partition) -> None:
    """Two cells over three workers, and pooled to one."""

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3, padding=1),
            torch.nn.BatchNorm2d(3),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(3, 2, 1),
        )

    assert_as_alone(make, grid(P_world, [1, 1, 3, 1]), [(2, 2, 5, 4)])
    assert_as_alone(make, grid(P_world, [1, 1, 3, 1]), [(2, 2, 2, 4)])
    assert_as_alone(make, grid(P_world, [3, 1, 1, 1]), [(2, 2, 4, 4)])


@distributed(ranks=3, transports=["loopback"])
def test_goes_back_to_one_worker(P_world: Partition) -> None:
    """The result has the current weights and mode, and the original's frozen parameters."""
    alone = NETWORKS["aspp"][0]().double().eval()
    alone.convs[0].weight.requires_grad_(False)
    net = distribute(copy.deepcopy(alone), grid(P_world, [1, 1, 1, 2], [2, 1]))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    back = sequential(net, root=1)
    assert (back is not None) == (P_world.rank == 1)
    if back is not None:
        assert type(back) is type(alone) and not back.training
        for (name, found), expected in zip(
            back.named_parameters(), alone.parameters(), strict=True
        ):
            assert torch.equal(found, expected * 2), name
            assert found.requires_grad == expected.requires_grad == (name != "convs.0.weight")


@distributed(ranks=2, transports=["loopback"])
def test_a_dropped_network_is_freed(P_world: Partition) -> None:
    """At once: parameters and gradients do not wait for the garbage collector."""
    make, shape, _ = NETWORKS["aspp"]
    P_x = grid(P_world, [1, 1, 2, 1])

    def dropped() -> ref[torch.nn.Module]:
        net = distribute(make().double(), P_x)
        net(own_block(random_like_all(shape, 1), P_x)).sum().backward()
        return ref(net)

    # Torch imports modules at the first call, and errors on the way keep its frames.
    dropped()
    gc.disable()
    try:
        assert dropped()() is None
    finally:
        gc.enable()


@distributed(ranks=2, transports=["loopback"])
def test_is_the_network(P_world: Partition) -> None:
    """The converted network keeps its class, modules, attributes and settings."""
    alone = NETWORKS["unet"][0]()
    alone.threshold = 0.5
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [1, 1, 2, 1, 1]))
    assert isinstance(net, type(alone)) and type(net).__name__ == "DistributedUNet3d"
    assert [type(m) for m in net.modules()][1:] == [type(m) for m in alone.modules()][1:]
    assert net.threshold == 0.5 and net.training
    net.threshold, _ = 0.25, net.eval()
    assert alone.threshold == 0.5 and alone.training and not net.down[0].training
    net.pool.return_indices = False
    net.extra = torch.nn.Linear(2, 2)
    assert "extra.weight" in net.state_dict()


@distributed(ranks=2, transports=("loopback",))
def test_the_text_says_the_partition(P_world: Partition) -> None:
    class Named(torch.nn.Linear):
        def extra_repr(self) -> str:
            return "of the user"

    P_x = P_world.grid(2, 1)
    net = distribute(Named(3, 3), P_x)
    assert repr(net) == f"DistributedNamed(of the user, P_x={P_x!r})"
    assert f"P_x={P_x!r}\n  (0): ReLU()" in repr(
        distribute(torch.nn.Sequential(torch.nn.ReLU()), P_x)
    )
    assert "P_x" not in repr(sequential(net))


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@distributed(ranks=2, transports=["loopback", "host"])
def test_copies_work_apart(P_world: Partition, replicate: bool) -> None:
    """Train a copy beside the network, as a moving average of the weights does."""
    make, shape, _ = NETWORKS["aspp"]
    torch.manual_seed(3)
    alone = make().double().eval()
    net: Any = distribute(
        copy.deepcopy(alone), grid(P_world, [1, 1, 2, 1]), replicate_parameters=replicate
    )
    whole = random_like_all(shape, 1)
    block = own_block(whole, net.P_x, requires_grad=False)
    net(block)
    average = copy.deepcopy(net)
    with torch.no_grad():
        for own in net.parameters():
            own.zero_()
    assert_whole(average(block), alone(whole), "copy")
    with torch.no_grad():
        for kept, own in zip(average.parameters(), net.parameters(), strict=True):
            kept.mul_(0.5).add_(own, alpha=0.5)
        for parameter in alone.parameters():
            parameter.mul_(0.5)
    y = average(block)
    assert_whole(y, alone(whole), "average")
    y.sum().backward()
    assert all(p.grad is not None for p in average.parameters() if p.numel())
    assert all(p.grad is None for p in net.parameters())


class _Tied(torch.nn.Module):
    """A weight in two places, a module under two names, and a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(6, 4, bias=False)
        self.inner = torch.nn.Linear(4, 4)
        self.again = self.inner
        self.head = torch.nn.Linear(6, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.embedding(x)) + self.shift
        return self.again(y) + self.head(x)


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@distributed(ranks=4, transports=["loopback"])
def test_shared_parameters(P_world: Partition, replicate: bool) -> None:
    """Have one gradient, and are shared afterwards."""
    P_x = grid(P_world, [2, 2, 1])
    net = assert_as_alone(_Tied, P_x, [(3, 5, 6)], replicate_parameters=replicate)
    assert net.head.weight is net.embedding.weight and net.again is net.inner
    back: Any = sequential(net)
    assert back.head.weight is back.embedding.weight and back.again is back.inner
