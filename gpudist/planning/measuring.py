"""A profile of the machine that ranks run on, measured while all of them work."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from gpudist.nn.local_conv import LocalConvolution
from gpudist.partition import Partition
from gpudist.planning.hardware import Link, Profile
from gpudist.transport.base import Signature

_TIMES = 8
_SHORT, _LONG = 50, 3  # calls in a row of what takes microseconds, and of what takes milliseconds
_SMALL_CELLS = 16
_LARGE_CELLS = 1 << 20
_CHANNELS = 16
_SIDE = 24
_ROWS = 1 << 16


def measured_profile(P_world: Partition, name: str = "measured") -> Profile:
    """What this machine does a second, in a profile for :func:`gpudist.planning.plan`.

    Collective over the world, of at least two ranks, which are taken to share one node: the link
    between nodes is given the same figures. Of a world of several nodes, edit what is saved.

    Args:
        P_world: all workers, all of which compute at the same time.
        name: of the profile.
    """
    small_s = _exchange_s(P_world, _SMALL_CELLS)
    large_s = _exchange_s(P_world, _LARGE_CELLS)
    size_bytes = 4 * (_LARGE_CELLS - _SMALL_CELLS)
    copy_bytes_per_s, kernel_s = _copying(P_world)
    # Packing and unpacking are counted apart.
    wire_s = max(large_s - small_s - 4 * size_bytes / copy_bytes_per_s, 0.1 * (large_s - small_s))
    link = Link(small_s * 1e6, small_s * 1e6 / 4, size_bytes / wire_s / 1e9)
    wire = P_world.transport if P_world.transport in ("nccl", "host") else "gloo"
    return Profile(
        name,
        f"measured over {P_world.transport} on {P_world.size} ranks of {P_world.device.type}",
        wire,  # pyright: ignore[reportArgumentType]
        P_world.size,
        link,
        link,
        _flops_per_s(P_world) / 1e12,
        copy_bytes_per_s / 1e9,
        kernel_s * 1e6,
        _row_s(P_world) * 1e9,
    )


def _exchange_s(P_world: Partition, cells: int) -> float:
    """Of a message from every even rank to the next, and then back."""
    size, rank = P_world.size, P_world.rank
    repeats = _SHORT if cells == _SMALL_CELLS else _LONG
    assert rank is not None
    peer = rank ^ 1
    block = torch.zeros(cells, device=P_world.device)
    came = torch.empty_like(block)
    if peer >= size:
        return _slowest_s(P_world, lambda: None, repeats)
    pair = P_world.create_partition_inclusive(sorted((rank, peer)))
    communicator, other = pair.communicator, int(rank < peer)
    signature = Signature(f"exchange of {cells} cells", cells.to_bytes(16, "little"))

    def exchange() -> None:
        with pair.wire.group(signature):
            communicator.send(block, other)
            communicator.recv(came, other)

    return _slowest_s(P_world, exchange, repeats)


def _copying(P_world: Partition) -> tuple[float, float]:
    """Bytes a second read and written by large kernels, and the seconds of a small one."""
    block = torch.zeros(_LARGE_CELLS * 8, device=P_world.device)
    few = torch.zeros(_SMALL_CELLS, device=P_world.device)
    kernel_s = _slowest_s(P_world, lambda: few.add_(1), _SHORT)
    return 2 * block.nbytes / _slowest_s(P_world, lambda: block.add_(1), _LONG), kernel_s


def _row_s(P_world: Partition) -> float:
    """Of a row of one cell that is packed, beside others at a distance."""
    cells = torch.zeros(_ROWS, _CHANNELS, device=P_world.device)
    return _slowest_s(P_world, lambda: cells[:, :1].clone(), _LONG) / _ROWS


def _flops_per_s(P_world: Partition) -> float:
    """Of a convolution in three dims, as layers carry it out."""
    x = torch.randn(1, _CHANNELS, _SIDE, _SIDE, _SIDE, device=P_world.device)
    weight = torch.randn(_CHANNELS, _CHANNELS, 3, 3, 3, device=P_world.device)
    flops = 2 * _CHANNELS * _CHANNELS * 27 * _SIDE**3
    convolve = LocalConvolution((1,) * 3, (1,) * 3, (1,) * 3, 1)
    with torch.no_grad():
        return flops / _slowest_s(P_world, lambda: convolve(x, weight, None), _LONG)


def _slowest_s(P_world: Partition, work: Callable[[], object], repeats: int) -> float:
    """The median time of ``work`` on the rank that takes longest, all starting together."""
    seconds: list[float] = []
    for _ in range(_TIMES):
        P_world.barrier()
        start_s = time.perf_counter()
        for _ in range(repeats):
            work()
        if P_world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start_s) / repeats)
    nanoseconds = int(median(seconds[2:]) * 1e9)
    return P_world.allreduce_data([nanoseconds], "max")[0] * 1e-9
