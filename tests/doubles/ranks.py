"""Ranks of the NCCL double, as threads or processes, that call it with NumPy arrays."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.doubles.nccl import DTYPES, OPS, Config, UniqueId, make_config, nccl

DEADLINE_S = 20.0


def address(x: np.ndarray | None) -> int | None:
    return None if x is None else x.ctypes.data


def length(*arrays: np.ndarray | None) -> int:
    return next(x.size for x in arrays if x is not None)


@dataclass
class Rank:
    """A rank's end of a communicator; every verb returns NCCL's result.

    ``dtype`` stands for a type that NumPy lacks (bfloat16, held as uint16).
    """

    comm: c_void_p
    rank: int
    size: int
    stream: int | None = None
    dtype: str | None = None

    def kind(self, *arrays: np.ndarray | None) -> int:
        name = next(x.dtype.name for x in arrays if x is not None)
        return DTYPES[self.dtype or name]

    def send(self, x: np.ndarray, peer: int) -> int:
        return nccl().ncclSend(address(x), x.size, self.kind(x), peer, self.comm, self.stream)

    def recv(self, y: np.ndarray, peer: int) -> int:
        return nccl().ncclRecv(address(y), y.size, self.kind(y), peer, self.comm, self.stream)

    def broadcast(self, x: np.ndarray | None, y: np.ndarray, root: int) -> int:
        return nccl().ncclBroadcast(
            address(x), address(y), y.size, self.kind(y), root, self.comm, self.stream
        )

    def reduce(self, x: np.ndarray, y: np.ndarray | None, op: str, root: int) -> int:
        return nccl().ncclReduce(
            address(x), address(y), x.size, self.kind(x), OPS[op], root, self.comm, self.stream
        )

    def all_reduce(self, x: np.ndarray, y: np.ndarray, op: str = "sum") -> int:
        return nccl().ncclAllReduce(
            address(x), address(y), x.size, self.kind(x), OPS[op], self.comm, self.stream
        )

    def reduce_scatter(self, x: np.ndarray, y: np.ndarray, op: str = "sum") -> int:
        return nccl().ncclReduceScatter(
            address(x), address(y), y.size, self.kind(y), OPS[op], self.comm, self.stream
        )

    def all_gather(self, x: np.ndarray, y: np.ndarray) -> int:
        return nccl().ncclAllGather(
            address(x), address(y), x.size, self.kind(x), self.comm, self.stream
        )

    def split(self, color: int, key: int) -> Rank | None:
        part = c_void_p()
        check(nccl().ncclCommSplit(self.comm, color, key, ctypes.byref(part), None))
        return None if part.value is None else describe(part)

    def async_error(self) -> int:
        error = c_int()
        check(nccl().ncclCommGetAsyncError(self.comm, ctypes.byref(error)))
        return error.value

    def finalize(self) -> int:
        return nccl().ncclCommFinalize(self.comm)

    def destroy(self) -> int:
        return nccl().ncclCommDestroy(self.comm)

    def abort(self) -> int:
        return nccl().ncclCommAbort(self.comm)


def check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"result {result}: {last_error()}")


def last_error(rank: Rank | None = None) -> str:
    return nccl().ncclGetLastError(None if rank is None else rank.comm).decode()


def describe(comm: c_void_p) -> Rank:
    rank, size = c_int(), c_int()
    check(nccl().ncclCommUserRank(comm, ctypes.byref(rank)))
    check(nccl().ncclCommCount(comm, ctypes.byref(size)))
    return Rank(comm, rank.value, size.value)


def make_id() -> bytes:
    made = UniqueId()
    check(nccl().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def init(unique_id: bytes, size: int, rank: int, config: Config | None = None) -> tuple[int, Any]:
    """Return the result of the call and the communicator."""
    comm = c_void_p()
    result = nccl().ncclCommInitRankConfig(
        ctypes.byref(comm),
        size,
        UniqueId.from_buffer_copy(unique_id),
        rank,
        ctypes.byref(config or make_config()),
    )
    return result, comm


def join(unique_id: bytes, size: int, rank: int) -> Rank:
    result, comm = init(unique_id, size, rank)
    check(result)
    return describe(comm)


class Group:
    """A group of calls; ``result`` is that of its end."""

    result: int | None = None

    def __enter__(self) -> Group:
        check(nccl().ncclGroupStart())
        return self

    def __exit__(self, *_: object) -> None:
        self.result = nccl().ncclGroupEnd()


def run_in_threads(size: int, body: Callable[[Rank], Any]) -> list[Any]:
    """Return the results of ``body`` on each rank of a new communicator, which is not destroyed."""
    unique_id = make_id()
    return run_all([lambda rank=rank: body(join(unique_id, size, rank)) for rank in range(size)])


def run_all(bodies: list[Callable[[], Any]]) -> list[Any]:
    """Run each in a thread; raise the first error, or an error if one does not end."""
    outcomes: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            outcomes[number] = bodies[number]()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(bodies))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a rank does not end")
    return outcomes
