"""Parameters on every worker that uses them: the sequential gradients, on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist.errors import PlanMismatch
from gpudist.exchange import all_reduce
from gpudist.exchange.tracing import Watching
from gpudist.nn import (
    DistributedBatchNorm2d,
    DistributedEmbedding,
    DistributedLinear,
    fuse_parameter_movements,
)
from gpudist.nn.parameters import buckets
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.nn.parameters.replication import copies_of
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
from tests.nn.in_place import blocks_of_any_size
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
    """Return a new layer with the values with which ``layer`` must be compared."""
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
    layer = DistributedEmbedding(  # pyright: ignore
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


@pytest.mark.parametrize("fused", [True, False])
@distributed(ranks=4)
def test_gradients_accumulate(P_world: Partition, fused: bool) -> None:
    """Accumulate over two backwards, then over two forwards followed by their backwards."""
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


@distributed(ranks=4, transports=["loopback", "host", "nccl"])
def test_sums_of_large_and_small_gradients(P_world: Partition) -> None:
    """Send two messages for a layer whose weight is too large to be copied.

    With streams, the second one is under way before the first has arrived.
    """
    P_x = grid(P_world, [4, 1])
    layer = DistributedLinear(P_x, 400, 400, dtype=F64, replicate_parameters=True)
    assert layer.weight.nbytes > buckets.COPIED_BYTES
    torch.manual_seed(1)
    whole = random_like_all((5, 400), 1)
    y = layer(own_block(whole, P_x))
    before = P_world.wire.recorder.count
    y.sum().backward()
    groups = 2 if P_world.transport == "nccl" else 1
    assert P_world.wire.recorder.count == before + groups
    expected = whole.sum(0).expand(400, 400)
    assert_equal_to(layer.weight.grad, expected, 1e-10, "weight")
    assert layer.bias is not None
    assert_equal_to(layer.bias.grad, torch.full((400,), 5.0, dtype=F64), 1e-10, "bias")


@pytest.mark.parametrize("is_large", [False, True])
@distributed(ranks=2, transports=["loopback", "nccl"])
def test_a_sum_has_the_memory_order_of_its_parameter(P_world: Partition, is_large: bool) -> None:
    shape = (16, 32, 25, 25) if is_large else (4, 3, 2, 5)
    weight = torch.ones(shape).to(memory_format=torch.channels_last).requires_grad_()
    assert (weight.nbytes > buckets.COPIED_BYTES) == is_large
    bias = torch.ones(4, requires_grad=True)
    for given in (weight, weight.detach().contiguous()):
        gradient = torch.empty_like(given).copy_(random_like_all(shape, 1))
        copies = copies_of([weight, bias], [P_world, P_world])
        sums = torch.autograd.grad(copies, (weight, bias), (gradient, bias.detach()))
        assert sums[0].stride() == weight.stride()
        assert torch.equal(sums[0], 2 * gradient) and torch.equal(sums[1], 2 * bias)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 200])
@distributed(ranks=4, transports=["loopback", "host", "gloo", "nccl"])
def test_buckets(P_world: Partition, bucket_bytes: int) -> None:
    """Gradients of 432, 24, 24, 24, 432 and 16 bytes, in buckets of at most so many."""
    P_x = grid(P_world, [1, 1, 2, 2])
    model, sequential = network(P_x, fused=False), sequential_network()
    fuse_parameter_movements(model, bucket_bytes=bucket_bytes)
    for seed in (1, 2):
        whole, block = batches(P_x, seed)
        loss_of(sequential, whole).backward()
        loss = loss_of(model, block)
        before = P_world.wire.recorder.count
        loss.backward()
        sums = P_world.wire.recorder.count - before - 2
        messages = {1: 6, 100: 4, 200: 4}[bucket_bytes]
        assert sums == (messages if P_world.transport == "nccl" else 1)
    assert_same_gradients(model, sequential, P_x)


@distributed(ranks=2, transports=["loopback", "nccl"])
def test_gradients_in_channels_last_are_not_reordered(P_world: Partition) -> None:
    form = torch.channels_last
    parameters = [torch.ones(4, 3, 3, 2).requires_grad_(), torch.ones(5).requires_grad_()]
    parameters[0] = parameters[0].detach().contiguous(memory_format=form).requires_grad_()
    rank = P_world.rank or 0
    given = torch.arange(72.0).view(4, 3, 3, 2) * (rank + 1)
    for seed in (given.contiguous(memory_format=form), given):
        parameters[0].grad = None
        weight, bias = copies_of(parameters, [P_world, P_world])
        with _Copies() as copies:
            torch.autograd.backward([weight, bias], [seed, torch.ones(5)])
        assert torch.equal(gradient_of(parameters[0]), torch.arange(72.0).view(4, 3, 3, 2) * 3)
        assert gradient_of(parameters[0]).stride() == parameters[0].stride()
        assert copies.count == (0 if seed.stride() == parameters[0].stride() else 1)


class _Copies(Watching):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket.__name__ in ("clone", "copy_", "contiguous")
        return func(*args, **(kwargs or {}))


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


@distributed(ranks=4, transports=["loopback", "host", "gloo"])
def test_ranks_that_disagree_about_gradients(P_world: Partition) -> None:
    """The sizes agree in total, but the parameters' numbers differ."""
    P_x = grid(P_world, [2, 1, 2, 1])
    layer = DistributedBatchNorm2d(P_x, 3, dtype=F64, replicate_parameters=True)
    frozen = layer.weight if P_world.rank == 2 else layer.bias
    assert frozen is not None
    frozen.requires_grad_(False)
    block = random_like_all((2, 3, 2, 2), 1)
    weight, bias = "parameters 0 to 0", "parameters 1 to 1"
    with pytest.raises(PlanMismatch, match=f"(?s){weight}.*{bias}|{bias}.*{weight}"):
        layer(block).sum().backward()
        P_world.barrier()
