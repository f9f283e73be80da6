"""Parameters of a network, with one owner or replicated, move together; so do their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from gpudist.exchange import all_reduce
from gpudist.exchange.autograd import has_tangents
from gpudist.nn import (
    DistributedConv2d,
    DistributedLinear,
    fuse_parameter_movements,
)
from gpudist.nn.parameters import buckets
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import Partition
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
from tests.nn.parameters.replicated_cases import (
    CASES,
    F64,
    Case,
    assert_same_gradients,
    batches,
    held_by,
    loss_of,
    network,
    sequential_network,
)
from tests.pool import distributed


def both(
    P_world: Partition, fused: bool = True, replicate: bool = False
) -> tuple[torch.nn.Sequential, torch.nn.Sequential, Any]:
    P_x = grid(P_world, [1, 1, 2, 2])
    return network(P_x, fused, replicate_parameters=replicate), sequential_network(), P_x


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.P_x}-{case.P_w}")
@distributed(ranks=5, transports=["loopback"])
def test_layer(P_world: Partition, case: Case) -> None:
    """Rank 4 has no part in it. Parameters, gradients and output have the bits of a layer alone."""
    P_x, P_y = case.partitions(P_world)
    layer = case.distributed(P_world, False)
    drawn = iter([layer])

    def fused() -> torch.nn.Module:
        layer.load_state_dict(case.distributed(P_world, False).state_dict())
        return fuse_parameter_movements(next(drawn))

    assert_same_as_sequential(
        case.sequential, fused, P_x, P_y, case.input_shape, held_by(lambda: layer), case.sizes,
        case.sizes,
    )  # fmt: skip
    alone = case.distributed(P_world, False)
    alone.load_state_dict(layer.state_dict())
    block = own_block(random_like_all(case.input_shape, 2), P_x, case.sizes)
    found: list[list[torch.Tensor]] = []
    for each in (layer.train(), alone.train()):
        y = each(block)
        leaves = [block, *each.parameters()]
        gradients = torch.autograd.grad(y.pow(2).sum(), leaves, allow_unused=True)
        found.append([y.detach(), *(g for g in gradients if g is not None)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fused, replicate", [(True, False), (False, True), (True, True)])
@distributed(ranks=4)
def test_gradients_accumulate(P_world: Partition, fused: bool, replicate: bool) -> None:
    """Accumulate over two backwards, then over two forwards followed by their backwards."""
    model, sequential, P_x = both(P_world, fused, replicate)
    for one, which in ((sequential, 0), (model, 1)):
        for seed in (1, 2):
            loss_of(one, batches(P_x, seed)[which]).backward()
        first, second = (loss_of(one, batches(P_x, seed)[which]) for seed in (3, 4))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    assert_same_gradients(model, sequential, P_x)


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=4, transports=["loopback", "host"])
def test_double_backward(P_world: Partition, replicate: bool) -> None:
    """A penalty on gradients; a replicated one counts once, as a loss does.

    A rank that owns no parameter may leave out gradients that have no cells.
    """
    model, sequential, P_x = both(P_world, replicate=replicate)
    for one, which in ((sequential, 0), (model, 1)):
        x = batches(P_x, 1)[which].requires_grad_()
        leaves = list(one.parameters())
        *found, of_input = torch.autograd.grad(loss_of(one, x), [*leaves, x], create_graph=True)
        taken = found if replicate or P_world.rank == 0 else found[2:3]
        penalty = sum((gradient.pow(3).sum() for gradient in taken), of_input.pow(3).sum())
        assert isinstance(penalty, torch.Tensor)
        penalty.backward()
    assert_same_gradients(model, sequential, P_x)


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=4, transports=["loopback"])
def test_gradients_without_accumulation(P_world: Partition, replicate: bool) -> None:
    """``torch.autograd.grad`` of all parameters, and of one."""
    model, sequential, P_x = both(P_world, replicate=replicate)
    for chosen in (slice(None), slice(4, 5)):
        found = [
            torch.autograd.grad(loss_of(one, batches(P_x, 1)[i]), list(one.parameters())[chosen])
            for i, one in enumerate((sequential, model))
        ]
        for expected, actual in zip(*found, strict=True):
            where = () if replicate or P_world.rank == 0 else None
            assert_block_of(actual, expected, where, "gradient")
    assert all(parameter.grad is None for parameter in model.parameters())


@distributed(ranks=4, transports=["loopback", "host"])
def test_evaluation_without_gradients(P_world: Partition) -> None:
    """New values of the parameters are seen; all move in one group."""
    model, sequential, P_x = both(P_world)
    whole, block = batches(P_x, 1)
    for one in (model, sequential):
        one.eval()
    for _ in range(2):
        with torch.no_grad():
            for one in (model, sequential):
                for parameter in one.parameters():
                    parameter.mul_(1.5)
            expected = sequential(whole)
            y = model(block)
            before = P_world.wire.recorder.count
            again = model(block)
            # One, and the ghosts of two convolutions.
            assert P_world.wire.recorder.count == before + 3
        assert not y.requires_grad and torch.equal(y, again)
        assert_block_of(y, expected, own_slices(expected.shape, P_x), "output")
    assert not model.requires_grad_(False)(block).requires_grad


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=4, transports=["loopback", "host"])
def test_optimizer(P_world: Partition, replicate: bool) -> None:
    model, sequential, P_x = both(P_world, replicate=replicate)
    for one, which in ((sequential, 0), (model, 1)):
        optimizer = torch.optim.Adam(one.parameters(), lr=1e-3, weight_decay=1e-2)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(one, batches(P_x, step)[which]).backward()
            optimizer.step()
    for (name, parameter), other in zip(
        model.named_parameters(), sequential.parameters(), strict=True
    ):
        where = () if replicate or P_x.rank == 0 else None
        assert_block_of(parameter.detach(), other.detach(), where, name, 1e-9)


@pytest.mark.parametrize("bucket_bytes", [1, 300, 25 << 20])
@distributed(ranks=4, transports=["loopback", "host", "gloo"])
def test_large_and_small_parameters_of_two_dtypes(P_world: Partition, bucket_bytes: int) -> None:
    """Buckets of any size give one group of messages."""
    P_x = grid(P_world, [4, 1])
    made: list[torch.nn.Sequential] = []
    for linear in (torch.nn.Linear, partial(DistributedLinear, P_x)):
        torch.manual_seed(1)
        layers = linear(3, 400, dtype=F64), linear(400, 400, dtype=F64), linear(400, 2)
        made.append(torch.nn.Sequential(*layers))
        made[-1][1].register_forward_hook(lambda module, inputs, y: y.float())
    sequential, model = made
    assert sequential[1].weight.nbytes > buckets.COPIED_BYTES  # pyright: ignore
    fuse_parameter_movements(model, bucket_bytes=bucket_bytes)
    whole = random_like_all((5, 3), 1)
    sequential(whole).double().pow(2).sum().backward()
    before = P_world.wire.recorder.count
    loss = model(own_block(whole, P_x)).double().pow(2).sum()
    assert P_world.wire.recorder.count == before + 1
    loss.backward()
    assert P_world.wire.recorder.count == before + 2
    for name, parameter in model.named_parameters():
        expected = gradient_of(sequential.get_parameter(name))
        assert_block_of(parameter.grad, expected, () if P_x.rank == 0 else None, name, 1e-5)


@distributed(ranks=4, transports=["loopback", "host"])
def test_both_placements_in_one_network(P_world: Partition) -> None:
    """A layer used twice, too."""
    P_x = grid(P_world, [1, 1, 2, 2])
    options: dict[str, Any] = {"padding": 1, "dtype": F64}
    torch.manual_seed(1)
    a, b = (torch.nn.Conv2d(2, 2, 3, **options) for _ in range(2))
    sequential = torch.nn.Sequential(a, b, torch.nn.Tanh(), a)
    torch.manual_seed(1)
    a = DistributedConv2d(P_x, 2, 2, 3, **options)
    b = DistributedConv2d(P_x, 2, 2, 3, **options, replicate_parameters=True)
    model = fuse_parameter_movements(torch.nn.Sequential(a, b, torch.nn.Tanh(), a))
    whole, block = batches(P_x, 1)
    loss_of(sequential, whole).backward()
    loss = loss_of(model, block)
    before = P_world.wire.recorder.count
    loss.backward()
    # The ghosts of two layers, the gradients of each placement.
    assert P_world.wire.recorder.count - before == 2 + 1 + 1
    assert_same_gradients(model, sequential, P_x)


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=3, transports=["host"])
def test_transforms(P_world: Partition, replicate: bool) -> None:
    """``torch.func``: gradients, and tangents, of functions of some of the parameters."""
    P_x = grid(P_world, [1, 1, 3, 1])
    model = network(P_x, replicate_parameters=replicate).eval()
    sequential = sequential_network().eval()
    found: list[list[torch.Tensor]] = []
    for one, x in zip((sequential, model), batches(P_x, 1), strict=True):
        own = {name: p.detach() for name, p in one.named_parameters()}
        others = {name: own.pop(name) for name in ("0.bias", "2.weight")}

        def loss(
            parameters: dict[str, torch.Tensor],
            one: torch.nn.Module = one,
            x: torch.Tensor = x,
            others: dict[str, torch.Tensor] = others,
        ) -> torch.Tensor:
            values = {**others, **parameters}
            return torch.func.functional_call(one, values, (x,)).pow(2).sum()

        gradients = torch.func.grad(loss)(own)
        tangent = torch.func.jvp(loss, (own,), (own,))[1]
        found.append([*gradients.values(), tangent])
    assert not has_tangents()
    *expected, total = found[0]
    *actual, part = found[1]
    for one, other in zip(actual, expected, strict=True):
        assert_block_of(one, other, () if P_x.rank == 0 or replicate else None, "gradient")
    assert_equal_to(all_reduce(part, P_x), total, 1e-10, "tangent")


@distributed(ranks=2, transports=["host"], timeout_s=120)
def test_compiled_layers_move_their_own(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    model, sequential = network(P_x, replicate_parameters=False), sequential_network()
    whole, block = batches(P_x, 1)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss_of(compiled, block).backward()
    loss_of(sequential, whole).backward()
    assert_same_gradients(model, sequential, P_x)
    assert placements(model)["0.weight"].copies == 1
