"""A rank of an MPI world: ``mpirun python -m benchmarks.peers.mpi NAME ADDRESS``, without torch.

Each subject has two sides: bare, into existing memory, and with a new result, as gpudist returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from benchmarks.case import Case, Side, equals, is_empty, partner, pattern, pattern_sum
from benchmarks.service import serve
from benchmarks.stencil import Stencil

Communicator = Any  # mpi4py has no types here: it is not installed beside gpudist


class Both(NamedTuple):
    """MPI calls into existing memory and with a new result; ``None`` if there is no such call."""

    bare: Side | None
    new: Side | None


def messages(case: Case, world: Communicator) -> Both:
    peer = partner(world.rank)
    x = pattern(case.parameters["count"], world.rank)
    if case.parameters.get("is_halo"):
        return Both(None, _block_and_ghosts(x, peer, world))
    y = np.empty_like(x)
    is_right = equals(pattern(x.size, peer))

    def into(y: np.ndarray) -> np.ndarray:
        world.Sendrecv(x, peer, recvbuf=y, source=peer)
        return y

    if case.parameters["bare"]:
        return Both(Side(lambda: into(y), is_right, lambda: y.fill(0)), None)
    return Both(None, Side(lambda: into(np.empty_like(x)), is_right))


def _block_and_ghosts(x: np.ndarray, peer: int, world: Communicator) -> Side:
    count = x.size

    def new() -> np.ndarray:
        y = np.empty(2 * count, x.dtype)
        y[:count] = x
        world.Sendrecv(x, peer, recvbuf=y[count:], source=peer)
        return y

    return Side(new, equals(np.concatenate([x, pattern(count, peer)])))


def broadcast(case: Case, world: Communicator) -> Both:
    count, is_root = case.parameters["count"], world.rank == 0
    block = pattern(count, 0)
    y = block.copy()

    def bare() -> np.ndarray:
        world.Bcast(y)
        return y

    def new() -> np.ndarray:
        if is_root:
            world.Bcast(block)
            return block.copy()
        y = np.empty(count, np.float32)
        world.Bcast(y)
        return y

    is_right = equals(block)
    return Both(Side(bare, is_right, lambda: None if is_root else y.fill(0)), Side(new, is_right))


def sum_reduce(case: Case, world: Communicator) -> Both:
    x = pattern(case.parameters["count"], world.rank)
    is_root = world.rank == 0
    y = np.empty_like(x) if is_root else None

    def into(y: np.ndarray | None) -> np.ndarray:
        world.Reduce(x, y)
        return y if y is not None else x[:0]

    is_right = equals(pattern_sum(x.size, world.size)) if is_root else is_empty
    return Both(
        Side(lambda: into(y), is_right, lambda: None if y is None else y.fill(0)),
        Side(lambda: into(np.empty_like(x) if is_root else None), is_right),
    )


def all_sum_reduce(case: Case, world: Communicator) -> Both:
    x = pattern(case.parameters["count"], world.rank)
    y = np.empty_like(x)

    def into(y: np.ndarray) -> np.ndarray:
        world.Allreduce(x, y)
        return y

    is_right = equals(pattern_sum(x.size, world.size))
    return Both(
        Side(lambda: into(y), is_right, lambda: y.fill(0)),
        Side(lambda: into(np.empty_like(x)), is_right),
    )


def repartition(case: Case, world: Communicator) -> Both:
    """Repartition by ``MPI_Alltoall`` of packed data; blocks of rows arrive in place."""
    n, size, rank = case.parameters["n"], world.size, world.rank
    width = n // size
    whole = pattern(n * n, 0).reshape(n, n)
    rows = whole[rank * width : (rank + 1) * width]
    packed = np.stack(np.split(rows, size, axis=1))
    y = np.empty((n, width), np.float32)

    def into(y: np.ndarray) -> np.ndarray:
        world.Alltoall(packed, y)
        return y

    is_right = equals(whole[:, rank * width : (rank + 1) * width].copy())
    return Both(
        Side(lambda: into(y), is_right, lambda: y.fill(0)),
        Side(lambda: into(np.empty((n, width), np.float32)), is_right),
    )


def operators(case: Case, world: Communicator) -> Both:
    return _OPERATORS[case.parameters["operator"]](case.parameters["count"], world)


def _scatter(count: int, world: Communicator) -> Both:
    whole = pattern(count, 0)
    part = count // world.size
    x = whole if world.rank == 0 else None

    def into(y: np.ndarray) -> np.ndarray:
        world.Scatter(x, y)
        return y

    expected = whole[world.rank * part : (world.rank + 1) * part]
    return _both(into, part, expected)


def _gather(count: int, world: Communicator) -> Both:
    whole = pattern(count, 0)
    part = count // world.size
    x = whole[world.rank * part : (world.rank + 1) * part].copy()

    def into(y: np.ndarray) -> np.ndarray:
        world.Gather(x, y if world.rank == 0 else None)
        return y

    is_root = world.rank == 0
    return _both(into, count if is_root else 0, whole if is_root else whole[:0])


def _all_gather(count: int, world: Communicator) -> Both:
    whole = pattern(count, 0)
    part = count // world.size
    x = whole[world.rank * part : (world.rank + 1) * part].copy()

    def into(y: np.ndarray) -> np.ndarray:
        world.Allgather(x, y)
        return y

    return _both(into, count, whole)


def _sum_scatter(count: int, world: Communicator) -> Both:
    x = pattern(count, world.rank)
    part = count // world.size

    def into(y: np.ndarray) -> np.ndarray:
        world.Reduce_scatter_block(x, y)
        return y

    expected = pattern_sum(count, world.size)[world.rank * part : (world.rank + 1) * part]
    return _both(into, part, expected)


def _shift(count: int, world: Communicator) -> Both:
    size, rank = world.size, world.rank
    x = pattern(count // size, rank)
    sender, receiver = (rank - 1) % size, (rank + 1) % size

    def into(y: np.ndarray) -> np.ndarray:
        world.Sendrecv(x, receiver, recvbuf=y, source=sender)
        return y

    return _both(into, x.size, pattern(x.size, sender))


def _both(into: Callable[[np.ndarray], np.ndarray], count: int, expected: np.ndarray) -> Both:
    y = np.empty(count, np.float32)
    is_right = equals(expected)
    return Both(
        Side(lambda: into(y), is_right, lambda: y.fill(-1)),
        Side(lambda: into(np.empty(count, np.float32)), is_right),
    )


_OPERATORS: dict[str, Callable[[int, Communicator], Both]] = {
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "sum_scatter": _sum_scatter,
    "shift": _shift,
}


def halo(case: Case, world: Communicator) -> Both:
    """Halo exchange.

    Bare: the messages alone, already packed. New: copy, pack, exchange, unpack.
    """
    shape = case.parameters["shape"]
    stencil = Stencil(shape, case.parameters["grid"], world.rank)
    whole = pattern(prod(shape), 0).reshape(shape)
    needed = stencil.needed(whole)
    x = whole[stencil.block].copy()
    ghosts = [(peer, needed[cells]) for peer, _, cells in stencil.neighbours]
    buffers = [np.empty(cells.shape, np.float32) for _, cells in ghosts]
    packed = [x[sent].copy() for _, sent, _ in stencil.neighbours]
    # Persistent requests are MPI's counterpart of a bound plan, and faster than new ones.
    requests = [world.Recv_init(b, peer) for (peer, _), b in zip(ghosts, buffers, strict=True)]
    requests += [world.Send_init(p, peer) for (peer, _), p in zip(ghosts, packed, strict=True)]

    def bare() -> list[np.ndarray]:
        for request in requests:
            request.Start()
        for request in requests:
            request.Wait()
        return buffers

    def new() -> np.ndarray:
        y = np.empty(stencil.needed_shape, np.float32)
        for cells in stencil.padding:
            y[cells] = 0
        y[stencil.inner] = x
        arrived = [np.empty(cells.shape, np.float32) for _, cells in ghosts]
        sent = [x[cells].copy() for _, cells, _ in stencil.neighbours]
        waiting = [world.Irecv(b, peer) for (peer, _), b in zip(ghosts, arrived, strict=True)]
        waiting += [world.Isend(b, peer) for (peer, _), b in zip(ghosts, sent, strict=True)]
        for request in waiting:
            request.Wait()
        for (_, _, cells), buffer in zip(stencil.neighbours, arrived, strict=True):
            y[cells] = buffer
        return y

    def all_arrived(arrived: list[np.ndarray]) -> bool:
        return all(map(np.array_equal, arrived, [cells for _, cells in ghosts]))

    def clear() -> None:
        for buffer in buffers:
            buffer.fill(-1)

    return Both(Side(bare, all_arrived, clear), Side(new, equals(needed)))


SUBJECTS: dict[str, Callable[[Case, Communicator], Both]] = {
    f.__name__: f
    for f in (messages, broadcast, sum_reduce, all_sum_reduce, operators, repartition, halo)
}


def main() -> None:
    from mpi4py import MPI  # type: ignore[import-not-found]  # here, since the controller reads SUBJECTS without it

    name, address = sys.argv[1:]
    world = MPI.COMM_WORLD

    def prepare(case: Case) -> dict[str, Side]:
        if case.subject not in SUBJECTS:
            return {}
        bare, new = SUBJECTS[case.subject](case, world)
        sides = {f"{name} bare": bare, name: new}
        return {name: side for name, side in sides.items() if side is not None}

    version = " ".join(MPI.Get_library_version().split(",")[0].split())
    version = version.partition(" MPICH Release")[0].replace(" Version:", "")
    serve(address, world.rank, {name: version}, world.Barrier, prepare)


if __name__ == "__main__":
    main()
