"""A batch of unknown structure from one rank to all: equal, owned, counted, failing together."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportOptionalMemberAccess=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from gpudist import broadcast_batch
from gpudist.errors import (
    GpudistError,
    PartitionError,
    PeerFailure,
    PlanMismatch,
    RemoteError,
    ShapeError,
    TransportError,
)
from gpudist.transport.failure.channel import Failure
from gpudist.world.partition import Partition
from tests.batch import nests
from tests.batch.nests import Encoding, Point, Sample, assert_same, nest
from tests.pool import distributed

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def complete(P: Partition) -> None:
    """Over NCCL results are there in stream order; let the host read them."""
    P.wire.wait()


def on_root(batch: Any, P: Partition, root: int = 0) -> Any:
    return batch if P.rank == root else None


@distributed(ranks=[1, 2, 4])
def test_random_nests(P_world: Partition) -> None:
    draw = random.Random(P_world.size)
    for _ in range(40):
        root = draw.randrange(P_world.size)
        batch = nest(draw, most_items=draw.choice([8, 40, 4000]))
        for _ in range(2):
            got = broadcast_batch(on_root(batch, P_world, root), P_world, root)
            complete(P_world)
            assert_same(got, batch)


@distributed(ranks=3)
def test_every_dtype(P_world: Partition) -> None:
    draw = random.Random(0)
    for most_items in (10, 5000):
        batch = [nests.tensor(draw, dtype, most_items) for dtype in nests.DTYPES for _ in range(3)]
        got = broadcast_batch(on_root(batch, P_world, 2), P_world, 2)
        complete(P_world)
        assert_same(got, batch, P_world.device)


@distributed(ranks=3)
def test_workers_of_a_partition(P_world: Partition) -> None:
    P = P_world.create_partition_inclusive([2, 0])
    batch = {"x": torch.arange(2000.0).view(40, 50).t()}
    got = broadcast_batch(batch if P_world.rank == 0 else None, P, root=1)
    complete(P_world)
    if P.active:
        assert_same(got, batch)
    else:
        assert got is None


def messages(P: Partition, call: Callable[[], object]) -> int:
    """Operations of this rank's wire, or wires, during a call."""
    wires = P.wire.wires
    before = [wire.recorder.count for wire in wires]
    call()
    return sum(w.recorder.count - count for w, count in zip(wires, before, strict=True))


@distributed(ranks=[2, 3], transports=("loopback", "host", "gloo"))
def test_messages(P_world: Partition) -> None:
    def send(length: int, text: str = "") -> int:
        batch = {"tokens": torch.arange(length), "mask": torch.ones(length), "text": text}
        return messages(P_world, lambda: broadcast_batch(on_root(batch, P_world), P_world))

    assert [send(length) for length in (5, 7, 0, 290)] == [1, 1, 1, 1]
    assert [send(length) for length in (5000, 5001, 400, 9000)] == [2, 2, 2, 2]
    assert send(0, "a" * 10_000) == 2
    assert send(5000, "a" * 10_000) == 3


@distributed(ranks=3)
def test_results_own_their_memory(P_world: Partition) -> None:
    for length in (10, 400_000):
        source = torch.arange(float(length))
        batches = [
            broadcast_batch(on_root([source + i, source[:3] - i], P_world), P_world)
            for i in range(4)
        ]
        kept = broadcast_batch(on_root([source], P_world), P_world)
        source += 1
        complete(P_world)
        expected = torch.arange(float(length))
        assert torch.equal(kept[0], expected)
        for i, (long, short) in enumerate(batches):
            assert torch.equal(long, expected + i) and torch.equal(short, expected[:3] - i)
        # Nor do tensors of one batch change one another, for autograd neither.
        long, short = batches[0]
        weight = torch.ones(3, requires_grad=True, device=short.device)
        product = weight * short
        long.zero_()
        product.sum().backward()
        assert weight.grad is not None and torch.equal(weight.grad.cpu(), expected[:3])


@distributed(ranks=3)
def test_tensors_from_where_they_lie(P_world: Partition) -> None:
    """Send many tensors, of mixed sizes, some of which cannot be read without a copy."""
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(300, 400, generator=generator)
    z = torch.complex(whole[:90], whole[-90:])
    batches = [
        [whole, whole[:0], whole[1:7], whole[0, 0]],
        [whole.t(), whole, torch.empty(0, 3)],
        [z, z.conj(), z.conj().imag, whole],
        [whole[i // 2, : i % 9].clone() for i in range(500)],
        {"a": [whole, (whole, 3)], "b": whole.to(torch.float8_e4m3fn)},
    ]
    for batch in batches:
        for _ in range(2):
            got = broadcast_batch(on_root(batch, P_world, 1), P_world, 1)
            complete(P_world)
            assert_same(got, batch)


@distributed(ranks=2)
def test_structures_alike_but_not_the_same(P_world: Partition) -> None:
    x = torch.ones(3)
    batches = [
        {"a": x, 1: [x]}, {"a": x, 1: [x]}, {"a": x, True: [x]}, {1: [x], "a": x},
        {"a": x, 1: (x,)}, {"a": x.double(), 1: [x]}, {"a": x[None], 1: [x]},
        {"a": x, 1: [x, x]}, {"a": x, 1: [None]},
        {"a": 1, 1: [x]}, {"a": True, 1: [x]}, {"a": 1.0, 1: [x]}, {(1,): x}, {(True,): x},
        Point(x, 1), Point(x, True), Sample(1, x), Sample(x, 1), x, None, [], {},
    ]  # fmt: skip
    for batch in [*batches, *reversed(batches)]:
        got = broadcast_batch(on_root(batch, P_world), P_world)
        complete(P_world)
        assert_same(got, batch)


class Odd:
    pass


@distributed(ranks=3)
def test_root_raises_for_all(P_world: Partition) -> None:
    def load() -> Any:
        raise KeyError("no such file \u20ac" * 500)

    for _ in range(2):
        with pytest.raises(KeyError if P_world.rank == 1 else RemoteError) as caught:
            broadcast_batch(load, P_world, root=1)
        if isinstance(caught.value, RemoteError):
            assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
            assert "rank 1" in str(caught.value) and "no such file" in str(caught.value)
        with pytest.raises(ShapeError if P_world.rank == 0 else RemoteError, match=r"batch\['a'\]"):
            broadcast_batch({"a": Odd()}, P_world)
        with pytest.raises(StopIteration):
            broadcast_batch(lambda: next(iter(())), P_world)
        # The world goes on.
        assert broadcast_batch(lambda: 3, P_world) == 3


@distributed(ranks=2)
def test_what_cannot_be_sent(P_world: Partition) -> None:
    class Local(Sample):
        pass

    cyclic: list[Any] = []
    cyclic.append(cyclic)
    sparse = torch.eye(2).to_sparse()
    array = np.array(["text"])
    flags = nests.Flags.A | nests.Flags.B
    factory = defaultdict(Odd)
    wrong = [
        {1, 2}, sparse, {Odd(): 1}, cyclic, Local(1), [[[bytearray()]]], Odd, array, flags, factory,
        Encoding({"a": Odd()}), np.ma.array([1]), nests.Closed({"a": Odd()}),
    ]  # fmt: skip
    for batch in wrong:
        expected = RemoteError if P_world.rank else (ShapeError, TransportError)
        with pytest.raises(expected):
            broadcast_batch([batch], P_world)


@distributed(ranks=2)
def test_attribute_of_a_mapping_that_cannot_be_sent(P_world: Partition) -> None:
    x = torch.ones(3)
    with (
        pytest.warns(UserWarning, match="_sequences of a mapping")
        if P_world.rank == 0
        else nullcontext()
    ):
        got = broadcast_batch(on_root(Encoding({"x": x}, [x, Odd()]), P_world), P_world)
    complete(P_world)
    assert_same(got, Encoding({"x": x}))
    assert_same(got.x, x)


@distributed(ranks=3)
def test_jagged_tensors_are_differentiable(P_world: Partition) -> None:
    values = torch.randn(5, 2, requires_grad=True)
    offsets = torch.tensor([0, 2, 5])
    batch = torch.nested.nested_tensor_from_jagged(values, offsets)
    got = broadcast_batch(on_root(batch, P_world), P_world, differentiable=True)
    assert got.requires_grad
    got.values().sum().backward()
    complete(P_world)
    if P_world.rank == 0:
        assert torch.equal(values.grad, torch.full((5, 2), 3.0))


@distributed(ranks=2)
def test_gradients_that_cannot_be_summed(P_world: Partition) -> None:
    batch = {"x": torch.ones(3).to(torch.float8_e5m2).requires_grad_()}
    with pytest.raises(
        RemoteError if P_world.rank else ShapeError,
        match=r"batch\['x'\] requires grad, but gradients of torch.float8_e5m2 cannot be summed",
    ):
        broadcast_batch(batch, P_world, differentiable=True)
    got = broadcast_batch(batch, P_world)
    complete(P_world)
    assert_same(got, {"x": batch["x"].detach()})
    assert not got["x"].requires_grad


@distributed(ranks=2, transports=("host", "gloo", "nccl"))
def test_class_that_a_receiver_does_not_have(P_world: Partition) -> None:
    if P_world.rank == 1:
        del nests.Sample
    try:
        with pytest.raises(GpudistError, match="Sample"):
            # A structure that no test before has let this process read.
            broadcast_batch({"only here": Sample(1, torch.ones(3))}, P_world)
            P_world.barrier()  # where the root learns of it
            complete(P_world)
    finally:
        if P_world.rank == 1:
            nests.Sample = Sample


@distributed(ranks=3)
def test_failure_elsewhere_ends_the_wait_for_a_batch(P_world: Partition) -> None:
    assert broadcast_batch(7, P_world, root=1) == 7
    if P_world.rank == 1:
        P_world.wire.abort(Failure("PeerFailure", 1, "rank 1 gave up"))
    else:
        with pytest.raises(PeerFailure, match="gave up"):
            broadcast_batch(None, P_world, root=1)


@distributed(ranks=2)
def test_ranks_disagree(P_world: Partition) -> None:
    with pytest.raises(PlanMismatch, match="broadcast_batch"):
        broadcast_batch(1, P_world, root=0, differentiable=P_world.rank == 1)
        P_world.barrier()


@distributed(ranks=2, transports=("loopback", "host", "gloo"))
def test_batch_out_of_turn_is_refused(P_world: Partition) -> None:
    """A batch is refused if one rank has evicted the previous schema."""
    for number in range(3):
        assert broadcast_batch(number, P_world) == number
    if P_world.rank == 0:
        P_world.wire.remembered.clear()
    with pytest.raises(TransportError, match="it is message 0, expected message 3"):
        broadcast_batch(3, P_world)
        P_world.barrier()  # where the root learns of it


@distributed(ranks=2)
def test_arguments_are_checked(P_world: Partition) -> None:
    with pytest.raises(PartitionError, match="root 2 is not one of 0 to 1"):
        broadcast_batch(1, P_world, root=2)
    with pytest.raises(PartitionError, match="has no Cartesian topology"):
        broadcast_batch(1, P_world, axes=(0,))


@distributed(ranks=6)
def test_axes(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([3, 2])
    row, column = P_x.index
    if row == 2:
        return  # no row waits for another
    for step in range(3):
        length = 10 + 3000 * row + step
        batch = Point(torch.arange(length).view(1, -1), {"row": row})
        got = broadcast_batch(batch if column == 1 else None, P_x, root=1, axes=(1,))
        complete(P_world)
        assert_same(got, batch)


def weights(rank: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return values.to(like.dtype)


@distributed(ranks=[1, 3])
def test_gradients_are_summed_at_the_root(P_world: Partition) -> None:
    for rows in (2, 50):
        torch.manual_seed(0)
        x = torch.randn(rows, 40, dtype=torch.float64, requires_grad=True)
        z = torch.randn(rows, dtype=torch.complex128, requires_grad=True)
        h = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
        constant = torch.arange(7)
        batch = {"x": x.t(), "n": 1, "z": [z], "h": h, "c": constant, "f": torch.ones(2)}
        got = broadcast_batch(on_root(batch, P_world), P_world, differentiable=True)
        assert got["x"].requires_grad and got["z"][0].requires_grad and not got["f"].requires_grad
        outputs = [got["x"], got["z"][0], got["h"]]
        ys = [weights(P_world.rank, y) for y in outputs]
        torch.autograd.backward(outputs, ys)
        complete(P_world)
        assert torch.equal(got["c"], constant)
        assert torch.equal(got["x"].detach(), x.detach().t())
        if P_world.rank == 0:
            for source, like in ((x, x.t()), (z, z), (h, h)):
                parts = [weights(r, like).to(source.dtype) for r in range(P_world.size)]
                total = torch.stack(parts).sum(0)
                total = total.t() if source is x else total
                tolerance = 0.02 if source is h else 1e-12
                torch.testing.assert_close(source.grad, total, rtol=tolerance, atol=tolerance)
        else:
            assert x.grad is None


@distributed(ranks=3)
def test_gradient_can_be_differentiated(P_world: Partition) -> None:
    x = torch.ones(4, 5, dtype=torch.float64, requires_grad=True)
    y = weights(P_world.rank, x).requires_grad_()
    (Fx,) = broadcast_batch(on_root([x], P_world), P_world, differentiable=True)
    if P_world.rank == 0:
        (adjoint,) = torch.autograd.grad(Fx, x, y, create_graph=True)
        assert adjoint.requires_grad
    else:
        Fx.backward(y)
