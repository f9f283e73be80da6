"""Parameters on every worker that uses them: the sequential gradients, on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import distribute
from gpudist.errors import PlanMismatch, ShapeError
from gpudist.exchange.tracing import Watching
from gpudist.nn import (
    DistributedBatchNorm2d,
    DistributedLinear,
    fuse_parameter_movements,
)
from gpudist.nn.parameters import buckets
from gpudist.nn.parameters.replication import copies_of
from gpudist.world.partition import Partition
from tests.nn.compare import (
    assert_equal_to,
    gradient_of,
    grid,
    own_block,
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


@pytest.mark.filterwarnings("ignore:.*sparse is not supported")
@distributed(ranks=2, transports=["loopback"])
def test_sparse_gradients_are_refused(P_world: Partition) -> None:
    net: Any = distribute(torch.nn.Embedding(5, 2, sparse=True), P_world.grid(2, 1))
    with pytest.raises(ShapeError, match=r"is sparse, .* sparse=False"):
        net(torch.tensor([[1, P_world.rank]])).sum().backward()
    P_world.barrier()


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
