"""Dense operators: their effect on the tensors of all ranks at once, without gpudist.

A dense operator maps the list of every rank's input to the list of every rank's output. Autograd
through it gives the gradients of the sequential program, on any one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch

from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world.partition import CartesianPartition, Partition

Tensors = list[torch.Tensor]
Dense = Callable[[Tensors], Tensors]


def partition_of(
    P_world: Partition, ranks: Sequence[int], shape: Sequence[int]
) -> CartesianPartition:
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


def cells(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a global tensor whose cells hold their index."""
    return torch.arange(prod(shape)).reshape(tuple(shape)).to(dtype)


def random(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a random tensor that every rank can make."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def block(x: torch.Tensor, shape: Sequence[int], index: Sequence[int]) -> torch.Tensor:
    """Return the balanced block of ``x`` at ``index`` of a process grid of ``shape``."""
    for dim, (parts, i) in enumerate(zip(shape, index, strict=True)):
        x = x.tensor_split(parts, dim)[i]
    return x.clone()


def blocks(x: torch.Tensor, shape: Sequence[int]) -> Tensors:
    """Return all balanced blocks, by rank."""
    return [block(x, shape, index) for index in np.ndindex(*shape)]


def assembled(parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """The global tensor whose blocks, by rank of a process grid of ``shape``, are ``parts``."""
    parts = list(parts)
    for dim in reversed(range(len(shape))):
        step = shape[dim]
        parts = [torch.cat(parts[i : i + step], dim) for i in range(0, len(parts), step)]
    return parts[0]


def local_input(x: torch.Tensor, P_x: CartesianPartition) -> torch.Tensor:
    """This rank's balanced block of ``x``, or a placeholder of its batch."""
    if P_x.index is None:
        return x.new_empty((x.shape[0], 0))
    return block(x, P_x.shape, P_x.index)


def gathered_sources(
    ranks_x: Sequence[int], shape_x: Sequence[int], ranks_y: Sequence[int], shape_y: Sequence[int]
) -> dict[int, int]:
    """World rank of each worker of P_y -> that of the worker of P_x it is matched with."""
    sources = np.broadcast_to(np.reshape(ranks_x, shape_x), shape_y)
    return dict(zip(ranks_y, map(int, sources.ravel()), strict=True))


def operations(P: Partition) -> int:
    """How many groups of messages this rank has started, and how often this was asked."""
    recorder = P.wire.recorder
    recorder.end(recorder.begin_group("counted by a test"))
    return P.wire.recorder.count


def compare_every_call(P: Partition) -> None:
    """Find a disagreement at any call, on a wire whose messages have no headers too."""
    if isinstance(P.wire, NcclTransport):
        P.wire.compares_every_call = True


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in every bit, shape and dtype."""
    assert actual.shape == expected.shape, f"{list(actual.shape)} != {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{actual.dtype} != {expected.dtype}"
    assert torch.equal(actual, expected), f"{actual} != {expected}"


def assert_matches_dense(
    operator: Callable[[torch.Tensor], torch.Tensor],
    dense: Dense,
    inputs: Sequence[torch.Tensor],
    P_world: Partition,
) -> None:
    """Output, gradient, and gradient of a gradient penalty are those of the sequential program."""
    rank = P_world.rank
    assert rank is not None
    xs = [x.detach().clone().requires_grad_() for x in inputs]
    x = inputs[rank].detach().clone().requires_grad_()
    ys = dense(xs)
    y = operator(x)
    assert y.dtype == ys[rank].dtype
    assert y.requires_grad
    torch.testing.assert_close(y, ys[rank], rtol=1e-12, atol=1e-12)
    for actual, expected in zip(_derivatives([y], [x]), _derivatives(ys, xs), strict=True):
        mine = expected[rank]
        assert actual[0].shape == x.shape
        assert actual[0].dtype == x.dtype
        torch.testing.assert_close(actual[0], mine, rtol=1e-11, atol=1e-11)


def _derivatives(outputs: Tensors, inputs: Tensors) -> tuple[Tensors, Tensors]:
    loss = torch.stack([(y**3 / 3 + y).sum() for y in outputs]).sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
    penalty = torch.stack([g.pow(2).sum() for g in first]).sum()
    second = torch.autograd.grad(penalty, inputs, materialize_grads=True)
    return list(first), list(second)
