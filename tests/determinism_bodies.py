"""Computations of the ranks in the tests of determinism, as digests of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import nn

import gpudist
from gpudist import ops
from gpudist.exchange import all_reduce
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from gpudist.world.partition import Partition

Results = dict[str, str]


def bits(x: torch.Tensor) -> str:
    cells = x.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{list(x.shape)} {sha256(cells.tobytes()).hexdigest()}"


@contextmanager
def in_rank_order(P_world: Partition, name: str) -> Any:
    """The world as ``init(deterministic=True)`` makes it; over NCCL one of its own, of ``name``."""
    wire = P_world.wire
    if not isinstance(wire, NcclTransport):
        yield P_world
        return
    prefix = f"{wire.prefix}/ordered/{name}"
    another = runtime.connect(
        "nccl", wire.store, wire.rank, wire.size, 20.0, prefix, deterministic=True
    )
    yield runtime.world_of(another)
    P_world.barrier()
    another.close()


def values(shape: Iterable[int], rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of very different sizes, so that another order of additions changes the sum."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    spread = torch.randint(-6, 7, x.shape, generator=generator)
    return (x * 2.0**spread).to(dtype)


def both_ways(name: str, operator: Callable[..., Any], x: torch.Tensor, dtype: Any) -> Results:
    """Return the output and the input's gradient."""
    x.requires_grad_()
    y = operator(x)
    y.backward(values(y.shape, 77, y.dtype))
    assert x.grad is not None
    return {f"{name} {dtype}": bits(y), f"adjoint of {name} {dtype}": bits(x.grad)}


def operators(P_world: Partition, seed: int = 0) -> Results:
    """Every operator that adds, forward and backward, in three dtypes; and the plain reductions."""
    found: Results = {}
    with in_rank_order(P_world, "operators") as P:
        rank, size = P.wire.rank, P.size
        line = P.create_cartesian_topology_partition([size])
        grid = P.create_cartesian_topology_partition([2, size // 2])
        rows = P.create_cartesian_topology_partition([size, 1])
        one = P.create_partition_inclusive([0]).create_cartesian_topology_partition([1])
        wide = ((2, 2), (2, 2))
        cases = {
            "all_sum_reduce": (lambda x: ops.all_sum_reduce(x, line, [0]), (7,)),
            "long all_sum_reduce": (lambda x: ops.all_sum_reduce(x, line, [0]), (70001,)),
            "halo": (lambda x: ops.halo_exchange(x, grid, halo=wide), (5, 4)),
            "periodic halo": (
                lambda x: ops.halo_exchange(x, grid, halo=wide, periodic=(True, True)), (3, 3),
            ),
            "repartition": (lambda x: ops.repartition(x, grid, rows), (4, 6)),
            "all_gather": (lambda x: ops.all_gather(x, grid, [1]), (4, 3)),
            "sum_scatter": (lambda x: ops.sum_scatter(x, grid, [0]), (4, 3)),
            "sum_reduce": (lambda x: ops.sum_reduce(x, line, one), (9,)),
        }  # fmt: skip
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for name, (operator, shape) in cases.items():
                found |= both_ways(name, operator, values(shape, rank + seed, dtype), dtype)
            x = values((5, 3), rank + seed, dtype)
            for op in ("sum", "prod", "max"):
                found[f"{op} {dtype}"] = bits(all_reduce(x, P, op))
    return found


def layers_in_place(P_world: Partition) -> Results:
    """Layers that leave a large block where it is and add what its faces get in the adjoint."""
    found: Results = {}
    with in_rank_order(P_world, "layers") as P:
        P_x = P.create_cartesian_topology_partition([1, 1, 2, 2])
        torch.manual_seed(3)
        conv = gpudist.nn.DistributedConv2d(P_x, 2, 2, 5, padding=2, dtype=torch.float64)
        pool = gpudist.nn.DistributedAvgPool2d(P_x, 5, stride=1, padding=2)
        for name, layer in {"conv": conv, "pool": pool}.items():
            x = values((1, 2, 256, 256), P.wire.rank, torch.float64)
            found |= both_ways(name, layer, x, x.dtype)
        for name, parameter in conv.named_parameters():
            assert parameter.grad is not None
            found[f"gradient of {name}"] = bits(parameter.grad)
    return found


def lenet5(P: Partition) -> nn.Sequential:
    images = P.create_cartesian_topology_partition([1, 1, 2, 2])
    two = P.create_partition_inclusive([0, 1])
    channels = two.create_cartesian_topology_partition([1, 2, 1, 1])
    features = two.create_cartesian_topology_partition([1, 2])
    weights = P.create_cartesian_topology_partition([2, 2])

    def conv(inside: int, outside: int, padding: int) -> nn.Module:
        return gpudist.nn.DistributedConv2d(images, inside, outside, 5, padding=padding)

    def linear(inside: int, outside: int) -> nn.Module:
        return gpudist.nn.DistributedLinear(features, features, weights, inside, outside)

    return nn.Sequential(
        conv(1, 6, 2), gpudist.nn.DistributedBatchNorm(images, 6), nn.ReLU(),
        gpudist.nn.DistributedMaxPool2d(images, 2),
        conv(6, 16, 0), nn.ReLU(), gpudist.nn.DistributedMaxPool2d(images, 2),
        gpudist.nn.Repartition(images, channels), nn.Flatten(),
        linear(400, 120), nn.ReLU(), linear(120, 84), nn.ReLU(), linear(84, 10),
    )  # fmt: skip


def training(P_world: Partition, steps: int = 3) -> Results:
    """LeNet-5 with a batch norm, for a few steps: losses, gradients and parameters."""
    found: Results = {}
    with in_rank_order(P_world, "training") as P:
        # The norms of a GPU, also of a double, add in another order.
        P.wire.device_library = ""
        torch.manual_seed(1)
        network = lenet5(P)
        two = P.create_partition_inclusive([0, 1]).create_cartesian_topology_partition([1, 2])
        criterion = gpudist.nn.DistributedCrossEntropyLoss(two)
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * step + P.wire.rank)
            x = torch.randn(8, 1, 14, 14, generator=generator)
            labels = torch.randint(10, (8,), generator=torch.Generator().manual_seed(step))
            loss = criterion(network(x), labels)
            network.zero_grad()
            loss.backward()
            found[f"loss {step}"] = bits(loss)
            for name, parameter in network.named_parameters():
                assert parameter.grad is not None
                found[f"gradient of {name} in step {step}"] = bits(parameter.grad)
                parameter.data.sub_(parameter.grad, alpha=0.1)
        found |= {name: bits(value) for name, value in network.state_dict().items()
                  if isinstance(value, torch.Tensor)}  # fmt: skip
    return found
