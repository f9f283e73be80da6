"""Thousands of shapes leave nothing behind: the cached operators are bounded."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import ctypes
import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch

from gpudist import nn, zero_volume_tensor
from gpudist.exchange import Movement
from gpudist.transport.host import core_transport as core
from gpudist.transport.nccl import transport as nccl
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world.partition import Partition
from tests.doubles import misuses_of_nccl
from tests.ops.dense import cells
from tests.pool import distributed

SHAPES = 10_000
CALLS = 1_600
WARM = 800
# Eight hundred calls that keep 52 bytes each are found.
ALLOWED_BYTES = 40 << 10
# Larger caches are reduced to this size, so that they are full after the warm-up.
MOST_REMEMBERED = 256
DEFAULT_REMEMBERED = 4096
LARGE_CACHES = ((core, "native_signature"), (nccl, "native_signature"))


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@contextmanager
def small_caches(P_world: Partition) -> Generator[None, None, None]:
    """Limit all caches of this rank to ``MOST_REMEMBERED`` entries."""
    made = [(module, name, getattr(module, name)) for module, name in LARGE_CACHES]
    world: Any = getattr(P_world.wire, "_core")  # noqa: B009
    try:
        for module, name, function in made:
            setattr(module, name, lru_cache(MOST_REMEMBERED)(function.__wrapped__))
        if P_world.transport == "nccl":
            world.set_remembered(MOST_REMEMBERED)
        yield
    finally:
        for module, name, function in made:
            setattr(module, name, function)
        if P_world.transport == "nccl":
            world.set_remembered(DEFAULT_REMEMBERED)


def bytes_in_use(P_world: Partition) -> int:
    """Return the bytes in use on the heap; resident memory depends on the order of frees."""
    if P_world.transport == "nccl":
        # The doubles keep a log.
        assert not misuses_of_nccl()
    measure = ctypes.CDLL("libc.so.6").mallinfo2
    measure.restype = _Heap
    gc.collect()
    heap = measure()
    return heap.uordblks + heap.hblkhd


def movements() -> int:
    gc.collect()
    return sum(type(thing) is Movement for thing in gc.get_objects())


def shape_of(call: int) -> tuple[int, ...]:
    """Another one at every call, large and small ones mixed: the digits of another number."""
    return tuple(1 + int(digit) for digit in f"{call * 7919 % SHAPES:04}")


def operator_of(P_world: Partition, name: str) -> Any:
    P_0 = P_world.create_partition_inclusive([0])
    if name == "broadcast":
        return nn.Broadcast(P_0, P_world, shape="dynamic")
    return nn.SumReduce(P_world, P_0, shape="dynamic")


@pytest.mark.parametrize("name", ["broadcast", "sum_reduce"])
@distributed(ranks=2, transports=["host", "nccl"], timeout_s=240.0)
def test_many_shapes(P_world: Partition, name: str) -> None:
    with small_caches(P_world):
        run_many_shapes(P_world, name)


def run_many_shapes(P_world: Partition, name: str) -> None:
    layer = operator_of(P_world, name)
    sums = 2 if name == "sum_reduce" else 1
    before = (0, 0)
    for call in range(CALLS):
        x = cells(shape_of(call)) if layer.P_x.active else zero_volume_tensor()
        y = layer(x)
        if layer.P_y.active and call % 97 == 0:
            assert torch.equal(y, sums * cells(shape_of(call)))
        if call == WARM:
            del x, y
            before = movements(), bytes_in_use(P_world)
    del x, y
    assert movements() <= before[0]
    assert bytes_in_use(P_world) - before[1] < ALLOWED_BYTES
    if isinstance(P_world.wire, NcclTransport):
        assert P_world.wire.staging_bytes <= 2 << 20


@distributed(ranks=2, transports=["host", "nccl"])
def test_backward_of_a_forgotten_shape(P_world: Partition) -> None:
    """A graph keeps its movement after the caches have evicted it."""
    layer = operator_of(P_world, "broadcast")
    first = cells((3, 5)) if P_world.rank == 0 else zero_volume_tensor()
    first.requires_grad_(P_world.rank == 0)
    y = layer(first)
    for call in range(600):
        layer(cells(shape_of(call)) if P_world.rank == 0 else zero_volume_tensor())
    y.backward(torch.full(y.shape, 2.0, dtype=y.dtype))
    if P_world.rank == 0:
        assert torch.equal(first.grad, torch.full((3, 5), 4.0).double())


@distributed(ranks=3, transports=["nccl"])
def test_blocks_without_cells_between_others(P_world: Partition) -> None:
    """A rank that sends nothing at one call is known to its partner, not to its partner's."""
    P_x = P_world.create_partition_inclusive([0, 1])
    P_y = P_world.create_partition_inclusive([1, 2])
    layer = nn.SendRecv(P_x, P_y, shape="dynamic")
    for rows in ((0, 3), (2, 3), (2, 0), (4, 4), (0, 0), (2, 3)):
        x = cells((rows[P_world.rank], 2)) if P_x.active else zero_volume_tensor()
        y = layer(x)
        if P_y.active:
            assert torch.equal(y, cells((rows[P_world.rank - 1], 2)))
