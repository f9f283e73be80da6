"""Behaviour common to all transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist.errors import ShapeError, TransportError
from gpudist.transport import TRANSPORTS
from gpudist.transport.base import Communicator, Signature, Transport
from tests.transport.worlds import outcomes, results

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.bool,
]
# Values whose sum depends on the order in which they are added.
TOUCHY = [1e8, 1.0, -1e8, 1.0, 3.0]
SIGNATURE = Signature("a test", bytes(16))

pytestmark = pytest.mark.parametrize("kind", list(reversed(TRANSPORTS)))


def world(transport: Transport) -> Communicator:
    return transport.communicator(range(transport.size))


def block(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that differs on every rank, with any bit patterns."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 100
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0) if values.dim() else -values)
    return values > 0 if dtype == torch.bool else values.to(dtype)


def touchy(rank: int, cells: int, dtype: torch.dtype) -> torch.Tensor:
    noise = torch.randn(cells, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    scale = 1e-4 if dtype == torch.float16 else 1.0
    return (TOUCHY[rank] * scale + noise).to(dtype)


def folded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum from left to right, in float32 for the narrow types, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.numpy(force=True).tobytes() == (b.numpy(force=True).tobytes())
    )


def pass_round(transport: Transport, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    ring = world(transport)
    left, right = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    received = torch.zeros(shape, dtype=dtype)
    with transport.group(SIGNATURE):
        ring.send(block(ring.rank, shape, dtype), right)
        ring.recv(received, left)
    return torch.equal(received, block(left, shape, dtype))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_send_and_recv_carry_every_dtype(kind: str, dtype: torch.dtype) -> None:
    assert results(kind, 3, pass_round, dtype, (3, 5)) == [True] * 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (961,), (965,), (750_000,)], ids=str)
def test_send_and_recv_carry_every_size(kind: str, shape: Sequence[int]) -> None:
    # 3840 bytes fit the first frame of gloo; 750,000 cells, 3 MB, go both ways at once.
    assert results(kind, 2, pass_round, torch.float32, shape) == [True] * 2


def send_many(transport: Transport) -> list[float]:
    pair = world(transport)
    sizes = [1, 5000, 0, 2, 70_000, 3]
    received = [torch.zeros(size) for size in sizes]
    with transport.group(SIGNATURE):
        for number, size in enumerate(sizes):
            pair.send(torch.full((size,), number + 10.0 * pair.rank), 1 - pair.rank)
        for tensor in received:
            pair.recv(tensor, 1 - pair.rank)
    return [tensor.unique().tolist() for tensor in received]


def test_messages_between_two_ranks_match_in_order(kind: str) -> None:
    found = results(kind, 2, send_many)
    for rank in range(2):
        other = 10.0 * (1 - rank)
        assert found[rank] == [[number + other] if number != 2 else [] for number in range(6)]


def broadcast(transport: Transport, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    everyone = world(transport)
    fine = True
    for root in range(everyone.size):
        tensor = block(everyone.rank, shape, dtype)
        everyone.broadcast(tensor, root)
        fine = fine and torch.equal(tensor, block(root, shape, dtype))
    return fine


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_carries_every_dtype(kind: str, dtype: torch.dtype) -> None:
    assert results(kind, 3, broadcast, dtype, (7,)) == [True] * 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(), (0,), (40_000,)], ids=str)
def test_broadcast_from_every_root(kind: str, size: int, shape: Sequence[int]) -> None:
    assert results(kind, size, broadcast, torch.float32, shape) == [True] * size


def sum_every_way(transport: Transport, cells: int, dtype: torch.dtype) -> list[bool]:
    everyone = world(transport)
    size, rank = everyone.size, everyone.rank
    parts = [touchy(i, size * cells, dtype) for i in range(size)]
    mine, expected = parts[rank], folded(parts)
    root = size - 1

    rooted = torch.empty_like(mine) if rank == root else None
    everyone.reduce(mine, rooted, root)
    everywhere = torch.empty_like(mine)
    everyone.all_reduce(mine, everywhere)
    in_place = mine.clone()
    everyone.all_reduce(in_place, in_place)
    piece = mine.new_empty(cells)
    everyone.reduce_scatter(mine.view(size, cells), piece)
    return [
        rooted is None or same_bits(rooted, expected),
        same_bits(everywhere, expected),
        same_bits(in_place, expected),
        same_bits(piece, expected.view(size, cells)[rank]),
        torch.equal(mine, parts[rank]),
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("cells", [1, 9001])
def test_sums_are_in_ascending_order(kind: str, size: int, cells: int) -> None:
    found = results(kind, size, sum_every_way, cells, torch.float32)
    assert found == [[True] * 5] * size


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex128, torch.int64], ids=str)
def test_sums_of_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    assert results(kind, 3, sum_every_way, 3001, dtype) == [[True] * 5] * 3


def sum_bfloat16(transport: Transport) -> float:
    everyone = world(transport)
    # 256 + 1 is 256 in bfloat16, but 256 + 1 + 1 + 1 + 1 is 260.
    value = torch.tensor(256.0 if everyone.rank == 0 else 1.0, dtype=torch.bfloat16)
    total = torch.empty_like(value)
    everyone.all_reduce(value, total)
    return total.item()


def test_narrow_sums_are_rounded_once(kind: str) -> None:
    assert results(kind, 5, sum_bfloat16) == [260.0] * 5


def reduce_by(transport: Transport, op: Any, cells: int) -> list[float]:
    everyone = world(transport)
    output = torch.empty(cells)
    everyone.all_reduce(torch.full((cells,), everyone.rank + 2.0), output, op)
    return output.unique().tolist()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("op", "value"), [("sum", 9), ("max", 4), ("min", 2), ("prod", 24)])
@pytest.mark.parametrize("cells", [3, 20_000])
def test_reduction_operators(kind: str, op: str, value: float, cells: int) -> None:
    assert results(kind, 3, reduce_by, op, cells) == [[value]] * 3


def reduce_without_root(transport: Transport) -> list[float] | None:
    everyone = world(transport)
    if everyone.rank == 1:
        output = torch.empty(2)
        everyone.reduce(None, output, 1)
        return output.tolist()
    everyone.reduce(torch.full((2,), 10.0 + everyone.rank), None, 1)
    return None


def test_the_root_may_contribute_nothing(kind: str) -> None:
    assert results(kind, 3, reduce_without_root) == [None, [22.0, 22.0], None]


def gather(transport: Transport, shape: Sequence[int]) -> bool:
    everyone = world(transport)
    output = torch.zeros(everyone.size, *shape, dtype=torch.float64)
    everyone.all_gather(block(everyone.rank, shape, torch.float64), output)
    parts = [block(i, shape, torch.float64) for i in range(everyone.size)]
    return torch.equal(output, torch.stack(parts))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 4), (9000,)], ids=str)
def test_all_gather_stacks_by_rank(kind: str, size: int, shape: Sequence[int]) -> None:
    assert results(kind, size, gather, shape) == [True] * size


def cross(transport: Transport, cells: int) -> list[list[float]]:
    rank = transport.rank
    groups = [(0, 1, 2), (1, 0, 3), (2, 3, 0), (3, 2, 1)]
    mine = [transport.communicator(group) for group in groups if rank in group]
    # Each rank calls them in an order of its own; the transport finds the common one.
    mine = mine[rank % len(mine) :] + mine[: rank % len(mine)]
    tensors = {group.members: torch.full((cells,), float(rank)) for group in mine}
    pair = transport.communicator([min(rank, rank ^ 1), max(rank, rank ^ 1)])
    received = torch.zeros(cells)
    with transport.group(SIGNATURE):
        for group in mine:
            group.broadcast(tensors[group.members], 0)
            if group is mine[0]:
                pair.recv(received, 1 - pair.rank)
        pair.send(torch.full((cells,), 100.0 + rank), 1 - pair.rank)
    found = [[float(key[0]), *value.unique().tolist()] for key, value in sorted(tensors.items())]
    return [*found, received.unique().tolist()]


@pytest.mark.parametrize("cells", [1, 5000])
def test_crossing_groups_do_not_deadlock(kind: str, cells: int) -> None:
    for rank, found in enumerate(results(kind, 4, cross, cells)):
        *broadcasts, received = found
        assert len(broadcasts) == 3
        assert all(root == value for root, value in broadcasts)
        assert received == [100.0 + (rank ^ 1)]


def split(transport: Transport) -> tuple[tuple[int, ...], int, float]:
    parent = world(transport)
    part = transport.split(parent, colors=[0, 1, 0, 1, 0], keys=[5, 0, 1, 0, 1])
    output = torch.empty(1)
    part.all_reduce(torch.tensor([float(transport.rank)]), output)
    return part.members, part.rank, output.item()


def test_split_orders_by_key_then_rank(kind: str) -> None:
    even, odd = (2, 4, 0), (1, 3)
    assert results(kind, 5, split) == [
        (even, 2, 6.0),
        (odd, 0, 4.0),
        (even, 0, 6.0),
        (odd, 1, 4.0),
        (even, 1, 6.0),
    ]


def misuse(transport: Transport) -> list[str]:
    everyone = world(transport)
    x = torch.zeros(2, 3)
    z = torch.zeros(2, dtype=torch.complex64)

    def words(call: Any) -> str:
        with pytest.raises((TransportError, ShapeError)) as caught:
            call()
        return str(caught.value)

    def nest() -> None:
        with transport.group(SIGNATURE), transport.group(SIGNATURE):
            pass

    found = [
        words(lambda: everyone.send(x, everyone.rank)),
        words(lambda: everyone.broadcast(x, 7)),
        words(lambda: everyone.send(x.T, 1 - everyone.rank)),
        words(lambda: everyone.all_reduce(x, torch.zeros(3, 2))),
        words(lambda: everyone.all_reduce(x, x, "mean")),  # pyright: ignore[reportArgumentType]
        words(lambda: everyone.all_reduce(z, z, "max")),
        words(lambda: everyone.reduce(x, None, everyone.rank)),
        words(lambda: everyone.all_gather(x, torch.zeros(3, 2, 3))),
        words(lambda: everyone.reduce_scatter(x, torch.zeros(2))),
        words(lambda: transport.communicator([1 - everyone.rank])),
        words(nest),
    ]
    # None of it has left anything behind.
    everyone.broadcast(x, 0)
    return found


def test_misuse_is_an_error_that_costs_nothing(kind: str) -> None:
    expected = [
        "itself", "size 2", "contiguous", "[3, 2]", "'mean'", "no order", "root",
        "[3, 2, 3]", "[2, 3]", "not a member", "do not nest",
    ]  # fmt: skip
    for found in results(kind, 2, misuse):
        for text, part in zip(found, expected, strict=True):
            assert part in text


def use_after_close(transport: Transport) -> str:
    world(transport).broadcast(torch.zeros(1), 0)
    transport.close()
    transport.close()
    with pytest.raises(TransportError) as caught:
        world(transport).broadcast(torch.zeros(1), 0)
    return str(caught.value)


def test_close_is_idempotent(kind: str) -> None:
    assert all("was closed" in text for text in results(kind, 2, use_after_close))


def with_gradients(transport: Transport) -> list[float]:
    everyone = world(transport)
    x = torch.full((2,), 1.0 + everyone.rank, requires_grad=True)
    output = torch.empty(2)
    everyone.all_reduce(x, output)
    everyone.broadcast(x, 1)
    assert not output.requires_grad
    return [*output.tolist(), *x.tolist()]


def test_verbs_are_outside_autograd(kind: str) -> None:
    ended = outcomes(kind, 2, with_gradients)
    assert [outcome.value for outcome in ended] == [[3.0, 3.0, 2.0, 2.0]] * 2


def gather_in_inference_mode(transport: Transport) -> Any:
    mine = torch.full((2,), float(transport.rank))
    with torch.inference_mode():
        found = torch.empty(2, 2)
        with transport.group(SIGNATURE):
            world(transport).all_gather(mine, found)
    return found.is_inference() and found[:, 0].tolist() == [0.0, 1.0]


def test_verbs_fill_tensors_of_inference_mode(kind: str) -> None:
    assert results(kind, 2, gather_in_inference_mode) == [True, True]
