"""Parameters on every worker that uses them: the sequential gradients, summed in few messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist.errors import PlanMismatch
from gpudist.exchange import all_reduce
from gpudist.nn import (
    DistributedBatchNorm2d,
    DistributedConv2d,
    DistributedEmbedding,
    DistributedLinear,
    HaloRegion,
    Repartition,
    fuse_gradient_sums,
    replication,
)
from gpudist.nn.placement import placements
from gpudist.partition import CartesianPartition, Partition
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    assert_same_as_sequential,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.in_place import blocks_of_any_size
from tests.nn.replicated_cases import CASES, F64, Case, held_by
from tests.pool import distributed

SHAPE = (4, 2, 9, 6)


@pytest.mark.parametrize("replicate", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.P_x}-{case.P_w}")
@distributed(ranks=5, transports=["loopback"])
def test_layer(P_world: Partition, case: Case, replicate: bool) -> None:
    """Rank 4 has no part in it."""
    P_x, P_y = case.partitions(P_world)
    layer = case.distributed(P_world, replicate)
    made = iter([layer])
    for name, placement in placements(layer).items():
        if name in ("weight", "bias"):
            users = P_x if case.P_w is None else grid(P_world, case.P_w)
            expected = users.size if replicate and name == "weight" else placement.P.size
            assert placement.P.size == expected
    torch.manual_seed(7)
    with blocks_of_any_size():
        assert_same_as_sequential(
            case.sequential,
            lambda: made_again(case, P_world, replicate, next(made)),
            P_x,
            P_y,
            case.input_shape,
            held_by(lambda: layer),
            case.sizes,
            case.sizes,
        )


def made_again(
    case: Case, P_world: Partition, replicate: bool, layer: torch.nn.Module
) -> torch.nn.Module:
    """A layer drawn now, with the values of which ``layer`` is to be compared."""
    drawn = case.distributed(P_world, replicate)
    layer.load_state_dict(drawn.state_dict())
    return layer


@pytest.mark.parametrize("split", [False, True])
@distributed(ranks=4, transports=["loopback"])
def test_embedding(P_world: Partition, split: bool) -> None:
    P_x = grid(P_world, [2, 1]) if split else grid(P_world, [2, 2])
    others = [grid(P_world, [2, 1, 1]), grid(P_world, [2, 1, 2, 1])] if split else []
    torch.manual_seed(1)
    sequential = torch.nn.Embedding(6, 3, padding_idx=1, dtype=F64)
    torch.manual_seed(1)
    layer = DistributedEmbedding(
        P_x, *others, 6, 3, padding_idx=1, dtype=F64, replicate_parameters=True
    )
    whole = torch.arange(12).view(4, 3) % 5
    P_y = layer.P_y if split else grid(P_world, [2, 2, 1])
    y_whole, y = sequential(whole), layer(own_block(whole, P_x, requires_grad=False))
    where = own_slices(y_whole.shape, P_y)
    assert_block_of(y.detach(), y_whole.detach(), where, "output")
    cotangent = random_like_all(y_whole.shape, 2)
    y_whole.backward(cotangent)
    y.backward(torch.zeros_like(y) if where is None else cotangent[where])
    where = held_by(lambda: layer)("weight", sequential.weight.shape)
    assert where is not None
    assert_block_of(layer.weight.grad, gradient_of(sequential.weight), where, "gradient")


def sequential_network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1, dtype=F64),
        torch.nn.Tanh(),
        torch.nn.BatchNorm2d(3, dtype=F64),
        torch.nn.Conv2d(3, 2, 3, stride=2, dtype=F64),
    )


def network(P_x: CartesianPartition, fused: bool = True, **options: Any) -> torch.nn.Sequential:
    torch.manual_seed(3)
    options = {"dtype": F64, "replicate_parameters": True, **options}
    made = torch.nn.Sequential(
        DistributedConv2d(P_x, 2, 3, 3, padding=1, **options),
        torch.nn.Tanh(),
        DistributedBatchNorm2d(P_x, 3, **options),
        DistributedConv2d(P_x, 3, 2, 3, stride=2, **options),
    )
    if fused:
        fuse_gradient_sums(made)
    return made


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """This worker's part of a loss that is a sum over the cells of the output."""
    return model(x).pow(2).sum()


def assert_same_gradients(
    model: torch.nn.Module, sequential: torch.nn.Module, P_x: CartesianPartition
) -> None:
    """Bitwise equal on all workers, too."""
    others = dict(sequential.named_parameters())
    for name, parameter in model.named_parameters():
        assert_equal_to(parameter.grad, gradient_of(others[name]), 1e-10, name)
        bits = gradient_of(parameter).contiguous().view(-1).view(torch.int64).tolist()
        assert all(other == bits for other in P_x.allgather_data(bits)), name


def batches(P_x: CartesianPartition, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = random_like_all(SHAPE, seed)
    return whole, own_block(whole, P_x, requires_grad=False)


@pytest.mark.parametrize("fused", [True, False])
@distributed(ranks=4)
def test_gradients_accumulate(P_world: Partition, fused: bool) -> None:
    """Of two backwards, then of two forwards before their backwards."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model, sequential = network(P_x, fused), sequential_network()
    for seed in (1, 2):
        whole, block = batches(P_x, seed)
        loss_of(sequential, whole).backward()
        loss_of(model, block).backward()
    assert_same_gradients(model, sequential, P_x)
    for one, sizes in ((sequential, 0), (model, 1)):
        first, second = (loss_of(one, batches(P_x, seed)[sizes]) for seed in (3, 4))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    assert_same_gradients(model, sequential, P_x)


@distributed(ranks=4)
def test_one_group_of_messages_for_the_network(P_world: Partition) -> None:
    """Six gradients of three layers; a layer on its own takes one group."""
    P_x = grid(P_world, [1, 1, 2, 2])
    _, block = batches(P_x, 1)
    forward, backward = {}, {}
    for name, options in (
        ("fused", {}),
        ("each layer", {"fused": False}),
        ("owned", {"replicate_parameters": False}),
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
        together = "sum of 6 gradients (parameters 0 to 5) over 4 workers" in last
        assert together == (name == "fused")
    assert forward == {"fused": 3, "each layer": 3, "owned": 3}
    # The first layer has no gradient of its input to send.
    assert backward == {"fused": 2 + 1, "each layer": 2 + 3, "owned": 3}


@pytest.mark.parametrize(
    ("copied_bytes", "parts"), [(0, [[0], [1]]), (80, [[1], [0]]), (96, [[0, 1]])]
)
def test_large_gradients_go_alone(copied_bytes: int, parts: list[list[int]]) -> None:
    """Of 96 and of 16 bytes."""
    gradients = [torch.zeros(12, dtype=F64), torch.zeros(2, dtype=F64)]
    assert replication._messages([0, 1], gradients, copied_bytes) == parts


@distributed(ranks=4, transports=["loopback", "host"])
def test_sums_of_large_and_small_gradients(P_world: Partition) -> None:
    """One group of two messages, of a layer whose weight is too large to be copied."""
    P_x = grid(P_world, [4, 1])
    layer = DistributedLinear(P_x, 400, 400, dtype=F64, replicate_parameters=True)
    assert layer.weight.nbytes > replication.COPIED_BYTES
    torch.manual_seed(1)
    whole = random_like_all((5, 400), 1)
    y = layer(own_block(whole, P_x))
    before = P_world.wire.recorder.count
    y.sum().backward()
    assert P_world.wire.recorder.count == before + 1
    expected = whole.sum(0).expand(400, 400)
    assert_equal_to(layer.weight.grad, expected, 1e-10, "weight")
    assert layer.bias is not None
    assert_equal_to(layer.bias.grad, torch.full((400,), 5.0, dtype=F64), 1e-10, "bias")


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@distributed(ranks=4, transports=["loopback", "host"])
def test_optimizers(P_world: Partition, make: Callable[..., torch.optim.Optimizer]) -> None:
    P_x = grid(P_world, [2, 1, 2, 1])
    model, sequential = network(P_x), sequential_network()
    for one, which in ((sequential, 0), (model, 1)):
        optimizer = make(one.parameters(), lr=1e-3, weight_decay=1e-2)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(one, batches(P_x, step)[which]).backward()
            optimizer.step()
    for (name, parameter), other in zip(
        model.named_parameters(), sequential.parameters(), strict=True
    ):
        assert_equal_to(parameter.detach(), other.detach(), 1e-9, name)


@pytest.mark.parametrize("fused", [True, False])
@distributed(ranks=4, transports=["loopback", "host"])
def test_double_backward(P_world: Partition, fused: bool) -> None:
    """A penalty on gradients: a replicated one counts once, as a loss does."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model, sequential = network(P_x, fused), sequential_network()
    for one, which in ((sequential, 0), (model, 1)):
        x = batches(P_x, 1)[which]
        leaves = list(one.parameters())
        gradients = torch.autograd.grad(loss_of(one, x), leaves, create_graph=True)
        torch.stack([gradient.pow(3).sum() for gradient in gradients]).sum().backward()
    assert_same_gradients(model, sequential, P_x)


@distributed(ranks=4, transports=["loopback"])
def test_gradients_without_accumulation(P_world: Partition) -> None:
    """``torch.autograd.grad`` of all parameters, and of one."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model, sequential = network(P_x), sequential_network()
    for chosen in (slice(None), slice(4, 5)):
        found = [
            torch.autograd.grad(loss_of(one, batches(P_x, 1)[i]), list(one.parameters())[chosen])
            for i, one in enumerate((sequential, model))
        ]
        for expected, actual in zip(*found, strict=True):
            assert_equal_to(actual, expected, 1e-10, "gradient")
    assert all(parameter.grad is None for parameter in model.parameters())


class WithUnused(torch.nn.Module):
    """A network one of whose layers has no part in the output."""

    def __init__(self, used: torch.nn.Module, unused: torch.nn.Module) -> None:
        super().__init__()
        self.used, self.unused = used, unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@distributed(ranks=4, transports=["loopback"])
def test_frozen_and_unused_parameters_have_no_gradient(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    unused = DistributedConv2d(P_x, 2, 3, 3, dtype=F64, replicate_parameters=True)
    sequential = WithUnused(sequential_network(), torch.nn.Conv2d(2, 3, 3, dtype=F64))
    model = fuse_gradient_sums(WithUnused(network(P_x, fused=False), unused))
    for one, which in ((sequential, 0), (model, 1)):
        frozen = one.get_parameter("used.0.weight").requires_grad_(False)
        loss_of(one, batches(P_x, 1)[which]).backward()
        for parameter in (frozen, *one.get_submodule("unused").parameters()):
            assert parameter.grad is None
            parameter.grad = torch.zeros_like(parameter)
    assert_same_gradients(model, sequential, P_x)


@pytest.mark.parametrize("whole_network", [True, False])
@distributed(ranks=4, transports=["loopback", "host"])
def test_checkpointing(P_world: Partition, whole_network: bool) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    model, sequential = network(P_x, fused=False), sequential_network()
    whole, block = batches(P_x, 1)
    loss_of(sequential, whole).backward()
    if whole_network:
        fuse_gradient_sums(model)
        y = checkpoint(model, block.requires_grad_(), use_reentrant=False)
    else:
        rest = Checkpointed(model[1:])
        y = fuse_gradient_sums(torch.nn.Sequential(model[0], rest))(block)
    assert isinstance(y, torch.Tensor)
    y.pow(2).sum().backward()
    assert_same_gradients(model, sequential, P_x)


class Checkpointed(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@distributed(ranks=5, transports=["loopback"])
def test_layers_on_different_workers(P_world: Partition) -> None:
    """Sums over several sets of workers; no rank is in all of them."""
    P_x = grid(P_world, [3, 1], [0, 1, 2])
    P_next = grid(P_world, [4, 1], [4, 3, 2, 1])
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.Linear(5, 4, dtype=F64), torch.nn.Tanh(), torch.nn.Linear(4, 3, dtype=F64)
    )
    torch.manual_seed(1)
    options: dict[str, Any] = {"dtype": F64, "replicate_parameters": True}
    model = torch.nn.Sequential(
        DistributedLinear(P_x, 5, 4, **options),
        torch.nn.Tanh(),
        Repartition(P_x, P_next),
        DistributedLinear(P_next, 4, 3, **options),
    )
    fuse_gradient_sums(model)
    whole = random_like_all((7, 5), 1)
    y_whole, y = sequential(whole), model(own_block(whole, P_x))
    cotangent = random_like_all((7, 3), 2)
    where = own_slices((7, 3), P_next)
    y_whole.backward(cotangent)
    y.backward(torch.zeros_like(y) if where is None else cotangent[where])
    for name, other, P in (("0.", "0.", P_x), ("3.", "2.", P_next)):
        for part in ("weight", "bias"):
            parameter = model.get_parameter(name + part)
            if P.active:
                expected = gradient_of(sequential.get_parameter(other + part))
                assert_equal_to(parameter.grad, expected, 1e-10, name + part)
            else:
                assert parameter.numel() == 0


@distributed(ranks=4, transports=["loopback"])
def test_halo_region(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1, dtype=F64),
        torch.nn.Tanh(),
        torch.nn.Conv2d(3, 2, 3, dtype=F64),
    )
    torch.manual_seed(1)
    options: dict[str, Any] = {"dtype": F64, "replicate_parameters": True}
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
    loss = loss_of(region, block)
    before = P_world.wire.recorder.count
    loss.backward()
    assert P_world.wire.recorder.count == before + 1
    assert_same_gradients(region, sequential, P_x)


@distributed(ranks=3, transports=["host"])
def test_transforms(P_world: Partition) -> None:
    """``torch.func``: gradients, and tangents, of functions of the parameters."""
    P_x = grid(P_world, [1, 1, 3, 1])
    model, sequential = network(P_x).eval(), sequential_network().eval()
    found: list[list[torch.Tensor]] = []
    for one, x in zip((sequential, model), batches(P_x, 1), strict=True):
        parameters = {name: p.detach() for name, p in one.named_parameters()}

        def loss(
            parameters: dict[str, torch.Tensor], one: torch.nn.Module = one, x: torch.Tensor = x
        ) -> torch.Tensor:
            return torch.func.functional_call(one, parameters, (x,)).pow(2).sum()

        gradients = torch.func.grad(loss)(parameters)
        tangent = torch.func.jvp(loss, (parameters,), (parameters,))[1]
        found.append([*gradients.values(), tangent])
    *expected, total = found[0]
    *actual, part = found[1]
    for one, other in zip(actual, expected, strict=True):
        assert_equal_to(one, other, 1e-10, "gradient")
    assert_equal_to(all_reduce(part, P_x), total, 1e-10, "tangent")


class _Fails(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("this layer fails")


@pytest.mark.parametrize("fails", [False, True])
@distributed(ranks=4, transports=["loopback"])
def test_copies_end_with_the_forward(P_world: Partition, fails: bool) -> None:
    """What is frozen afterwards is frozen, and a layer alone sums its own gradients."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model, sequential = network(P_x), sequential_network()
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


@distributed(ranks=4, transports=["loopback", "host", "gloo"])
def test_ranks_that_disagree_about_gradients(P_world: Partition) -> None:
    """Of one size altogether: the parameters' numbers tell."""
    P_x = grid(P_world, [2, 1, 2, 1])
    layer = DistributedBatchNorm2d(P_x, 3, dtype=F64, replicate_parameters=True)
    frozen = layer.weight if P_world.rank == 2 else layer.bias
    assert frozen is not None
    frozen.requires_grad_(False)
    block = random_like_all((2, 3, 2, 2), 1)
    weight, bias = "parameters 0 to 0", "parameters 1 to 1"
    with pytest.raises(PlanMismatch, match=f"{weight}.*{bias}|{bias}.*{weight}"):
        layer(block).sum().backward()
        P_world.barrier()


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


@pytest.mark.parametrize("fails", [False, True])
@distributed(ranks=5, transports=["loopback", "host"])
def test_modules_that_are_not_distributed(P_world: Partition, fails: bool) -> None:
    """Their gradients are summed too, in the same message; rank 4 has no part."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model = with_modules_between(network(P_x, fused=False))
    fuse_gradient_sums(model, P_x)
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
        assert "sum of 6 gradients" in P_world.wire.recorder.lines(last=1)[0]
    assert_same_gradients(model, sequential, P_x)


@pytest.mark.parametrize("fullgraph", [False, True])
@distributed(ranks=4, transports=["host"], timeout_s=120)
def test_a_graph_does_not_leave_gradients_unsummed(P_world: Partition, fullgraph: bool) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    model = fuse_gradient_sums(with_modules_between(network(P_x, fused=False)), P_x)
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
