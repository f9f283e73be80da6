"""The parameters of a whole network, and their gradients, moved in one group of messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist.nn import (
    DistributedConv2d,
    DistributedLinear,
    HaloRegion,
    Repartition,
    fuse_parameter_movements,
)
from gpudist.world.partition import Partition
from tests.nn.compare import (
    assert_equal_to,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.parameters.replicated_cases import (
    F64,
    assert_same_gradients,
    batches,
    loss_of,
    network,
    sequential_network,
)
from tests.pool import distributed


@distributed(ranks=4)
def test_one_group_of_messages_for_the_network(P_world: Partition) -> None:
    """Six parameters of three layers. With one owner, a layer on its own sends them with ghosts."""
    P_x = grid(P_world, [1, 1, 2, 2])
    _, block = batches(P_x, 1)
    forward, backward = {}, {}
    for name, options in (
        ("fused", {}),
        ("each layer", {"fused": False}),
        ("owned, fused", {"replicate_parameters": False}),
        ("owned, each layer", {"replicate_parameters": False, "fused": False}),
    ):
        model = network(P_x, **options)
        loss_of(model, block).backward()
        before = P_world.wire.recorder.count
        loss = loss_of(model, block)
        between = P_world.wire.recorder.count
        loss.backward()
        forward[name] = between - before
        backward[name] = P_world.wire.recorder.count - between
        last = P_world.wire.recorder.lines(last=1)[0]
        sums = "sum of 6 gradients (parameters 0 to 5) over 4 workers" in last
        assert sums == (name == "fused")
        spread = "adjoint of broadcast of 6 parameters (0 to 5) from 1 to 4 workers" in last
        assert spread == (name == "owned, fused")
    # The norm sends twice, since it is float64.
    assert forward == {"fused": 4, "each layer": 4, "owned, fused": 4 + 1, "owned, each layer": 4}
    # The first layer has no gradient of its input to send.
    assert backward == {
        "fused": 2 + 1,
        "each layer": 2 + 3,
        "owned, fused": 2 + 1,
        "owned, each layer": 2 + 1,
    }


class WithUnused(torch.nn.Module):
    """A network one of whose layers has no part in the output."""

    def __init__(self, used: torch.nn.Module, unused: torch.nn.Module) -> None:
        super().__init__()
        self.used, self.unused = used, unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=4, transports=["loopback"])
def test_frozen_and_unused_parameters_have_no_gradient(P_world: Partition, replicate: bool) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    unused = DistributedConv2d(P_x, 2, 3, 3, dtype=F64, replicate_parameters=replicate)
    sequential = WithUnused(sequential_network(), torch.nn.Conv2d(2, 3, 3, dtype=F64))
    used = network(P_x, fused=False, replicate_parameters=replicate)
    model = fuse_parameter_movements(WithUnused(used, unused))
    for one, which in ((sequential, 0), (model, 1)):
        frozen = one.get_parameter("used.0.weight").requires_grad_(False)
        loss_of(one, batches(P_x, 1)[which]).backward()
        for parameter in (frozen, *one.get_submodule("unused").parameters()):
            assert parameter.grad is None
            parameter.grad = torch.zeros_like(parameter)
    assert_same_gradients(model, sequential, P_x)


@pytest.mark.parametrize("replicate", [True, False])
@pytest.mark.parametrize("whole_network", [True, False])
@distributed(ranks=4, transports=["loopback", "host"])
def test_checkpointing(P_world: Partition, whole_network: bool, replicate: bool) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    model = network(P_x, fused=False, replicate_parameters=replicate)
    sequential = sequential_network()
    whole, block = batches(P_x, 1)
    loss_of(sequential, whole).backward()
    if whole_network:
        fuse_parameter_movements(model)
        y = checkpoint(model, block.requires_grad_(), use_reentrant=False)
    else:
        rest = Checkpointed(model[1:])
        y = fuse_parameter_movements(torch.nn.Sequential(model[0], rest))(block)
    assert isinstance(y, torch.Tensor)
    y.pow(2).sum().backward()
    assert_same_gradients(model, sequential, P_x)


class Checkpointed(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=5, transports=["loopback"])
def test_layers_on_different_workers(P_world: Partition, replicate: bool) -> None:
    """Sums over several sets of workers; no rank is in all of them."""
    P_x = grid(P_world, [3, 1], [0, 1, 2])
    P_next = grid(P_world, [4, 1], [4, 3, 2, 1])
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.Linear(5, 4, dtype=F64), torch.nn.Tanh(), torch.nn.Linear(4, 3, dtype=F64)
    )
    torch.manual_seed(1)
    options: dict[str, Any] = {"dtype": F64, "replicate_parameters": replicate}
    model = torch.nn.Sequential(
        DistributedLinear(P_x, 5, 4, **options),
        torch.nn.Tanh(),
        Repartition(P_x, P_next),
        DistributedLinear(P_next, 4, 3, **options),
    )
    fuse_parameter_movements(model)
    whole = random_like_all((7, 5), 1)
    y_whole, y = sequential(whole), model(own_block(whole, P_x))
    cotangent = random_like_all((7, 3), 2)
    where = own_slices((7, 3), P_next)
    y_whole.backward(cotangent)
    y.backward(torch.zeros_like(y) if where is None else cotangent[where])
    for name, other, P in (("0.", "0.", P_x), ("3.", "2.", P_next)):
        for part in ("weight", "bias"):
            parameter = model.get_parameter(name + part)
            if P.rank == 0 or (P.active and replicate):
                expected = gradient_of(sequential.get_parameter(other + part))
                assert_equal_to(parameter.grad, expected, 1e-10, name + part)
            else:
                assert parameter.numel() == 0


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=4, transports=["loopback"])
def test_halo_region(P_world: Partition, replicate: bool, around: bool) -> None:
    """Its parameters move together, alone or with those of the surrounding network."""
    P_x = grid(P_world, [1, 1, 2, 2])
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1, dtype=F64),
        torch.nn.Tanh(),
        torch.nn.Conv2d(3, 2, 3, dtype=F64),
    )
    torch.manual_seed(1)
    options: dict[str, Any] = {"dtype": F64, "replicate_parameters": replicate}
    region = HaloRegion(
        P_x,
        [
            DistributedConv2d(P_x, 2, 3, 3, padding=1, **options),
            torch.nn.Tanh(),
            DistributedConv2d(P_x, 3, 2, 3, **options),
        ],
    )
    whole, block = batches(P_x, 1)
    loss_of(sequential, whole).backward()
    if around:
        fuse_parameter_movements(region)
    loss = loss_of(region, block)
    before = P_world.wire.recorder.count
    loss.backward()
    assert P_world.wire.recorder.count == before + 1
    assert_same_gradients(region, sequential, P_x)


class _Fails(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("this layer fails")


@pytest.mark.parametrize("replicate", [True, False])
@pytest.mark.parametrize("fails", [False, True])
@distributed(ranks=4, transports=["loopback"])
def test_copies_end_with_the_forward(P_world: Partition, fails: bool, replicate: bool) -> None:
    """Parameters frozen afterwards stay frozen, and a layer on its own moves its parameters."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model, sequential = network(P_x, replicate_parameters=replicate), sequential_network()
    whole, block = batches(P_x, 1)
    if fails:
        last = model.append(_Fails())
        with pytest.raises(ValueError, match="this layer fails"):
            last(block)
        del model[-1]
    else:
        model(block)
    loss_of(model[0], block).backward()
    loss_of(sequential[0], whole).backward()
    assert_same_gradients(model[0], sequential[0], P_x)
    assert not model.requires_grad_(False)(block).requires_grad


class Scaled(torch.nn.Module):
    """A module of the user's, with a parameter for each cell of a sample's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.arange(1.0, 4.0, dtype=F64).view(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def with_modules_between(model: torch.nn.Sequential) -> torch.nn.Sequential:
    between = torch.nn.Sequential(torch.nn.PReLU(3, dtype=F64), Scaled())
    return torch.nn.Sequential(model[0], between, model[3])


@pytest.mark.parametrize("replicate", [True, False])
@pytest.mark.parametrize("fails", [False, True])
@distributed(ranks=5, transports=["loopback", "host"])
def test_modules_that_are_not_distributed(P_world: Partition, fails: bool, replicate: bool) -> None:
    """Their gradients are summed with those of replicated modules; rank 4 takes no part."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model = with_modules_between(network(P_x, fused=False, replicate_parameters=replicate))
    fuse_parameter_movements(model, P_x)
    sequential = with_modules_between(sequential_network())
    names = [name for name, _ in sequential.named_parameters()]
    if not P_x.active:
        return
    whole, block = batches(P_x, 1)
    if fails:
        model.append(_Fails())
        with pytest.raises(ValueError, match="this layer fails"):
            model(block)
        del model[-1]
    parameters = dict(model.named_parameters())
    for seed in (1, 2):
        whole, block = batches(P_x, seed)
        loss_of(sequential, whole).backward()
        loss = loss_of(model, block)
        assert list(parameters) == names
        assert all(p is parameters[name] for name, p in model.named_parameters())
        loss.backward()
        last = "\n".join(P_world.wire.recorder.lines(last=2))
        assert f"sum of {6 if replicate else 2} gradients" in last
    assert_same_gradients(model, sequential, P_x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fullgraph", [False, True])
@distributed(ranks=2, transports=["host"], timeout_s=120)
def test_a_graph_does_not_leave_gradients_unsummed(P_world: Partition, fullgraph: bool) -> None:
    P_x = grid(P_world, [1, 1, 1, 2])
    model = fuse_parameter_movements(with_modules_between(network(P_x, fused=False)), P_x)
    sequential = with_modules_between(sequential_network())
    whole, block = batches(P_x, 1)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    if fullgraph:
        with pytest.raises(Exception, match="cannot be summed in a graph"):
            compiled(block)
        return
    loss_of(compiled, block).backward()
    loss_of(sequential, whole).backward()
    assert_same_gradients(model, sequential, P_x)
