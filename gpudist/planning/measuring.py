"""Measure a profile of the machine on which the ranks run, while all of them work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn

from gpudist.checks.arguments import checked
from gpudist.convert import distribute
from gpudist.nn.affine.local_conv import LocalConvolution
from gpudist.planning.hardware import ConvolutionRate, Link, Profile
from gpudist.transport.base import Signature
from gpudist.transport.dry import posting_of
from gpudist.world.partition import Partition

_TIMES, _TIMES_LONG = 8, 5
_SHORT, _LONG = 50, 3  # Consecutive calls, for work that takes microseconds or milliseconds.
_SMALL_CELLS = 16
_LARGE_CELLS = 1 << 20
_CHANNELS = (4, 8, 16, 32, 64)
_PRODUCT = 512
_STRIDE = 16
_ROWS = 1 << 16
_LAYERS = 8
_KEPT = 6
# Cells of a convolution: enough to reach the usual speed, few enough to take 0.1 s.
_FLOPS = 3e8
_CELLS = (1 << 12, 1 << 15)
# Sides of small volumes, whose convolutions are far slower by their operations.
_SIDES = (2, 4, 8)
# A GPU needs far more cells to reach its full speed.
_TIMES_ON_GPU = 64


@checked()
def measured_profile(
    P_world: Partition,
    name: str = "measured",
    progress: Callable[[str, int, int], None] | None = None,
) -> Profile:
    """Measure this machine, for :func:`gpudist.planning.plan`.

    Collective over the world, which has at least two ranks. They are assumed to share one node, so
    the link between nodes gets the same figures. For a world of several nodes, edit the saved file.

    Args:
        P_world: partition of all workers, which compute at the same time.
        name: name of the profile.
        progress: function called with the next item, the number of finished items, and the total.

    Returns:
        The measured profile.
    """
    names = ["messages", "copies", "products", *(f"{c} channels" for c in _CHANNELS), ""]

    def begin(done: int) -> None:
        if progress is not None:
            progress(names[done], done, len(names) - 1)

    begin(0)
    small_s = _exchange_s(P_world, _SMALL_CELLS)
    large_s = _exchange_s(P_world, _LARGE_CELLS)
    size_bytes = 4 * (_LARGE_CELLS - _SMALL_CELLS)
    begin(1)
    copy_bytes_per_s, kernel_s = _copying(P_world)
    row_s = _row_s(P_world)
    # Packing and unpacking are counted separately.
    wire_s = max(large_s - small_s - 4 * size_bytes / copy_bytes_per_s, 0.1 * (large_s - small_s))
    latency_s = _latency_s(P_world, small_s)
    link = Link(latency_s * 1e6, small_s * 1e6 / 4, size_bytes / wire_s / 1e9)
    posting = posting_of(P_world.transport)
    begin(2)
    flops_per_s, layer_s = _flops_per_s(P_world), _layer_s(P_world, kernel_s)
    rates: list[ConvolutionRate] = []
    for number, channels in enumerate(_CHANNELS):
        begin(3 + number)
        for side in _SIDES:
            x = torch.randn(1, channels, *(side,) * 3, device=P_world.device)
            rates.append(_convolution_rate(P_world, x, _LONG, kernel_s))
        rates.append(_convolution_rate(P_world, _many_cells(P_world, channels), 1, kernel_s))
    begin(len(names) - 1)
    return Profile(
        name,
        f"measured over {P_world.transport} on {P_world.size} ranks of {P_world.device.type}",
        posting,  # pyright: ignore[reportArgumentType]
        P_world.size,
        link,
        link,
        flops_per_s / 1e12,
        copy_bytes_per_s / 1e9,
        kernel_s * 1e6,
        row_s * 1e9,
        convolutions=tuple(rates),
        layer_us=layer_s * 1e6,
        measured_on=P_world.size,
    )


def _exchange_s(P_world: Partition, cells: int) -> float:
    """Return the seconds of a message from every even rank to the next rank, and back."""
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


def _latency_s(P_world: Partition, small_s: float) -> float:
    """Return the seconds of a layer's group of small messages, at least ``small_s`` of one alone.

    Layers of a step reach a message at different times, and Python calls more for it.
    """
    # On a GPU, Python runs ahead.
    if P_world.device.type == "cuda":
        return small_s
    assert P_world.rank is not None
    peer = P_world.rank ^ 1
    alone = [P_world.rank]
    pair = alone if peer >= P_world.size else sorted((P_world.rank, peer))
    seconds = [_volumes_s(P_world, ranks) for ranks in (alone, pair)]
    # One group forward and one backward in each layer.
    return max(small_s, (seconds[1] - seconds[0]) / (2 * _LAYERS))


def _volumes_s(P_world: Partition, ranks: Sequence[int]) -> float:
    """Return the seconds of a step of convolutions of small volumes, side by side on ``ranks``."""
    grid = (1, 1, len(ranks), 1, 1)
    P_x = P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(grid)
    chain = [nn.Conv3d(2, 2, 3, padding=1, bias=False) for _ in range(_LAYERS)]
    converted = distribute(nn.Sequential(*chain).requires_grad_(False), P_x)
    x = torch.ones(1, 2, 4, 4, 4, requires_grad=True)

    def step() -> None:
        y = converted(x).to_local()
        y.backward(torch.ones_like(y))

    return _slowest_s(P_world, step, _LONG)


def _copying(P_world: Partition) -> tuple[float, float]:
    # As in later steps, outputs are in memory that was used before, but not lately.
    times = _TIMES_ON_GPU if P_world.device.type == "cuda" else 1
    block = torch.zeros(_LARGE_CELLS * times, device=P_world.device)
    outputs = [torch.zeros_like(block) for _ in range(_KEPT)]
    few = torch.zeros(_SMALL_CELLS, device=P_world.device)
    kernel_s = _slowest_s(P_world, lambda: few.add_(1), _SHORT)
    kept_s = _slowest_s(P_world, lambda: [torch.add(block, 1, out=y) for y in outputs], _LONG)
    return 2 * _KEPT * block.nbytes / kept_s, kernel_s


def _row_s(P_world: Partition) -> float:
    cells = torch.zeros(_ROWS, _STRIDE, device=P_world.device)
    return _slowest_s(P_world, lambda: cells[:, :1].clone(), _LONG) / _ROWS


def _flops_per_s(P_world: Partition) -> float:
    a = torch.randn(_PRODUCT, _PRODUCT, device=P_world.device)
    return 2 * _PRODUCT**3 / _slowest_s(P_world, lambda: a @ a, _LONG)


def _many_cells(P_world: Partition, channels: int) -> torch.Tensor:
    times = _TIMES_ON_GPU if P_world.device.type == "cuda" else 1
    fewest, most = _CELLS
    cells = min(max(int(_FLOPS / (2 * channels**2 * 27)), fewest), most) * times
    return torch.randn(1, channels, 16, 16, cells // 256, device=P_world.device)


def _convolution_rate(
    P_world: Partition, x: torch.Tensor, repeats: int, kernel_s: float
) -> ConvolutionRate:
    """Return the rate of a convolution of ``x`` in three dims, computed as layers do."""
    channels = x.shape[1]
    weight = torch.randn(channels, channels, 3, 3, 3, device=P_world.device)
    convolve = LocalConvolution((1,) * 3, (1,) * 3, (1,) * 3, 1)
    flops = 2 * channels * 27 * x.numel()
    with torch.no_grad():
        gradient = torch.randn_like(convolve(x, weight))
        forward_s = _slowest_s(P_world, lambda: convolve(x, weight), repeats, _TIMES_LONG)
        backward_s = _slowest_s(
            P_world, lambda: convolve.gradients(gradient, x, weight, (True, True)), repeats,
            _TIMES_LONG,
        )  # fmt: skip
    # The start of a kernel is counted separately.
    forward_s, backward_s = (max(s - kernel_s, s / 2) for s in (forward_s, backward_s))
    rates = flops / forward_s / 1e12, 2 * flops / backward_s / 1e12
    return ConvolutionRate(channels, *rates, gflop=flops / 1e9)


def _layer_s(P_world: Partition, kernel_s: float) -> float:
    """Return the seconds that Python takes per layer, from layers with few cells on one rank."""
    if P_world.device.type == "cuda":
        return 0.0
    assert P_world.rank is not None
    alone = P_world.create_partition_inclusive([P_world.rank])
    P_x = alone.create_cartesian_topology_partition((1,) * 5)
    chain = [
        layer
        for _ in range(_LAYERS // 2)
        for layer in (nn.Conv3d(2, 2, 3, padding=1, bias=False), nn.GroupNorm(1, 2))
    ]
    converted = distribute(nn.Sequential(*chain), P_x, replicate_parameters=True)
    x = torch.ones(1, 2, 4, 4, 4)
    return max(0.0, _slowest_s(P_world, lambda: converted(x), 1) / _LAYERS - kernel_s)


def _slowest_s(
    P_world: Partition, work: Callable[[], object], repeats: int, times: int = _TIMES
) -> float:
    """Return the median time of ``work`` on the slowest rank; all ranks start together."""
    seconds: list[float] = []
    for _ in range(times):
        P_world.barrier()
        start_s = time.perf_counter()
        for _ in range(repeats):
            work()
        if P_world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start_s) / repeats)
    nanoseconds = int(median(seconds[2:]) * 1e9)
    return P_world.allreduce_data([nanoseconds], "max")[0] * 1e-9
