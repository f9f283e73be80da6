"""A batch of tensors whose lengths change at every step, from rank 0 to all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.case import KIB, MIB, Case, Side
from benchmarks.peers import gloo
from gpudist import broadcast_batch
from gpudist.transport.gloo import GlooTransport
from gpudist.world.partition import Partition

DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.bool)
TENSORS = 12
STEPS = 7
SIZES = (("2 MiB", 2 * MIB, 2), ("64 KiB", MIB // 16, 2), ("2 KiB", 2 * KIB, 1))
WAIT_S = 300.0
EACH = f"tensor by tensor, {1 + TENSORS} messages"

Batch = dict[str, torch.Tensor]

_made: list[str] = []


def cases(ranks: int) -> list[Case]:
    """Return the cases. Bytes are approximate: lengths differ by up to 1/8 between steps."""
    return [
        Case(
            "batch", f"{name} over {wire}, messages: {messages}", ranks, nbytes,
            {"nbytes": nbytes, "wire": wire, "messages": messages}, nbytes if nbytes > MIB else 0,
        )
        for wire in ("shared memory", "gloo")
        for name, nbytes, messages in SIZES
    ]  # fmt: skip


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return our side.

    The peers pickle the same batches, or send them tensor by tensor with shapes.
    """
    gloo.start(P_world)
    batches = [_batch(case.parameters["nbytes"], step) for step in range(STEPS)]
    names = [(name, x.dtype, x.dim()) for name, x in batches[0].items()]
    over_gloo, expected = case.parameters["wire"] == "gloo", case.parameters["messages"]
    P = _gloo_partition(P_world) if over_gloo else P_world

    def side(send: Callable[[Batch | None], Batch], P_counted: Partition | None = None) -> Side:
        steps = itertools.count()
        made: list[int] = []

        def call() -> Batch:
            step = next(steps) % STEPS
            made.append(step)
            return send(batches[step] if P_world.rank == 0 else None)

        def is_right(got: Batch) -> bool:
            fits = _equal(got, batches[made[-1]])
            return fits and (P_counted is None or messages_of(P_counted) == expected)

        def messages_of(P: Partition) -> int:
            """Count the messages of one extra call: counting slows down as a world records more."""
            before = P.wire.recorder.count
            call()
            return P.wire.recorder.count - before

        return Side(call, is_right)

    def tensor_by_tensor(broadcast: Callable[[torch.Tensor], object]) -> Side:
        return side(lambda batch: _tensor_by_tensor(batch, names, broadcast))

    found = {
        "gloo gpudist" if over_gloo else "gpudist": side(lambda b: broadcast_batch(b, P), P),
        f"gpudist {EACH}": tensor_by_tensor(lambda x: P.communicator.broadcast(x, 0)),
        f"gloo {EACH}": tensor_by_tensor(lambda x: dist.broadcast(x, 0)),
        "gloo broadcast_object_list, 2 messages": side(_as_objects),
    }
    if over_gloo:
        found[f"gloo gpudist {EACH}"] = found.pop(f"gpudist {EACH}")
    return found


def _gloo_partition(P_world: Partition) -> Partition:
    """Return the ranks of ``P_world`` as a partition over our own gloo transport."""
    rank, size = P_world.rank, P_world.size
    assert rank is not None
    store = dist.distributed_c10d._get_default_store()
    prefix = f"batches {len(_made)}"
    _made.append(prefix)
    wire = GlooTransport(store, rank, size, WAIT_S, prefix=prefix, same_node=True)
    return Partition(wire, range(size))


def _batch(nbytes: int, step: int) -> Batch:
    """Return ``TENSORS`` tensors, each a 12th of the bytes, with row counts that vary by step."""
    generator = torch.Generator().manual_seed(step)
    batch: Batch = {}
    for i in range(TENSORS):
        dtype = DTYPES[i % len(DTYPES)]
        items = nbytes // TENSORS // dtype.itemsize
        length = items // 8 - items * ((step + i) % STEPS) // (8 * 8 * STEPS)
        values = torch.randint(0, 2, (8, length), generator=generator)
        batch[f"field {i}"] = values.to(dtype)
    return batch


def _tensor_by_tensor(
    batch: Batch | None,
    names: list[tuple[str, torch.dtype, int]],
    broadcast: Callable[[torch.Tensor], object],
) -> Batch:
    """Send the shapes, then every tensor; all ranks know the names, dtypes and numbers of dims."""
    shapes = torch.empty(sum(dims for _, _, dims in names), dtype=torch.int64)
    if batch is not None:
        shapes = torch.tensor([extent for x in batch.values() for extent in x.shape])
    broadcast(shapes)
    extents = iter(shapes.tolist())
    got: Batch = {}
    for name, dtype, dims in names:
        shape = [next(extents) for _ in range(dims)]
        got[name] = torch.empty(shape, dtype=dtype) if batch is None else batch[name].clone()
        broadcast(got[name])
    return got


def _as_objects(batch: Batch | None) -> Batch:
    box: list[Any] = [batch]
    dist.broadcast_object_list(box, 0)
    return box[0]


def _equal(got: Batch, expected: Batch) -> bool:
    return list(got) == list(expected) and all(
        got[name].dtype == x.dtype and torch.equal(got[name], x) for name, x in expected.items()
    )
