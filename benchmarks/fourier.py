"""Spectral convolutions over a split dim, compared with an all-gather and dfno's partitions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gpudist
from benchmarks.case import Case, Side
from benchmarks.layers import block_of
from benchmarks.peers import gloo
from gpudist.exchange import all_reduce
from gpudist.geometry.blocks import Blocks
from gpudist.ops import AllGather, Repartition
from gpudist.world.partition import Partition

# Shape of the input, and kept modes of each transformed dim.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "2-D 64^2": ((4, 8, 64, 64), (16, 8)),
    "2-D 128^2": ((4, 8, 128, 128), (32, 16)),
    "3-D 32^3": ((4, 4, 32, 32, 32), (8, 8, 4)),
}
TOLERANCE = 1e-4


def cases(ranks: int) -> list[Case]:
    """Return the cases, with what all ranks send: gpudist, as dfno's partitions, and all-gather."""
    found: list[Case] = []
    for name, (shape, kept) in CASES.items():
        moved, gathered = sent_bytes(shape, kept, ranks)
        words = f"{name}, modes {list(kept)}, sent {moved} B, all-gather {gathered} B"
        more = {"shape": shape, "kept": kept}
        found.append(Case("fourier", words, ranks, moved, more, prod(shape) * 4 // ranks))
    return found


def sent_bytes(shape: Sequence[int], kept: Sequence[int], ranks: int) -> tuple[int, int]:
    """Return the bytes that all ranks send: gpudist and dfno's partitions, and all-gather.

    The batch and the first two transformed dims must be divisible by the number of ranks, and
    also the kept modes of the second.
    """
    partly = prod(shape[:3]) * prod(kept[1:])
    return 2 * 8 * partly * (ranks - 1) // ranks, 4 * prod(shape) * (ranks - 1)


def centered(n: int, kept: int) -> slice:
    """Return the lowest frequencies of a shifted spectrum of ``n``."""
    return slice(n // 2 - kept // 2, n // 2 - kept // 2 + kept)


class SpectralConvolution(nn.Module):
    """A Fourier layer as users write it: the kept modes of ``x``, multiplied, are added to it."""

    def __init__(self, channels: int, kept: Sequence[int]) -> None:
        super().__init__()
        self.kept = tuple(kept)
        self.weight = nn.Parameter(torch.randn(channels, channels, *kept, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = list(range(2, x.dim()))
        f = torch.fft.fftshift(torch.fft.rfftn(x, dim=dims), dim=dims[:-1])
        rows = [centered(f.shape[d], n) for d, n in zip(dims[:-1], self.kept, strict=False)]
        modes = (slice(None), slice(None), *rows, slice(self.kept[-1]))
        out = torch.zeros(f.shape, dtype=f.dtype, device=x.device)
        out[modes] = product(f[modes], self.weight)
        out = torch.fft.ifftshift(out, dim=dims[:-1])
        return x + torch.fft.irfftn(out, s=x.shape[2:], dim=dims)


def product(modes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bi...,io...->bo...", modes, weight)


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides. Peers: the whole tensor on every rank, and dfno's repartitions."""
    gloo.start(P_world)
    shape, kept = case.parameters["shape"], case.parameters["kept"]
    size = P_world.size
    torch.manual_seed(0)
    layer, x = SpectralConvolution(shape[1], kept), torch.randn(shape)
    P_x = P_world.create_cartesian_topology_partition([1, 1, size, *[1] * (len(shape) - 3)])
    block = block_of(x, P_x).contiguous()
    expected = block_of(layer(x).detach(), P_x)
    # Without the shape, ranks would agree on it at every call.
    network = SpectralConvolution(shape[1], kept)
    converted = gpudist.distribute(network, P_x, inputs={"x": shape})
    converted.load_state_dict(layer.state_dict())
    gather = AllGather(P_x, (2,))
    parts = [torch.empty_like(block) for _ in range(size)]

    def by_gloo() -> torch.Tensor:
        dist.all_gather(parts, block)
        return torch.cat(parts, dim=2)

    def of_whole(whole: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: block_of(layer(whole()), P_x).clone()

    moved, gathered = sent_bytes(shape, kept, size)

    def side(run: Callable[[], torch.Tensor], nbytes: int | None) -> Side:
        def call() -> torch.Tensor:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return run()

        def is_right(y: torch.Tensor) -> bool:
            near = y.shape == expected.shape and bool(
                (y - expected).abs().max() <= TOLERANCE * expected.abs().max()
            )
            return near and (nbytes is None or counted_bytes(call, P_world) == nbytes)

        return Side(call, is_right)

    return {
        "gpudist": side(lambda: converted(block).to_local(), moved),
        "all-gather": side(of_whole(lambda: gather(block)), gathered),
        "gloo all-gather": side(of_whole(by_gloo), None),
        "dfno partitions": side(AfterDfno(layer, shape, P_world, block), moved),
    }


def counted_bytes(call: Callable[[], object], P_world: Partition) -> int:
    """Return the bytes that all ranks send for one call."""

    def so_far() -> int:
        return sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))

    before = so_far()
    call()
    return int(all_reduce(torch.tensor([so_far() - before]), P_world))


class AfterDfno:
    """The layer on blocks, with the two partitions of dfno.

    Dims that are whole are transformed and cut to their kept modes before the repartition that
    makes the first transformed dim whole. Each worker multiplies its own modes.
    """

    def __init__(
        self,
        layer: SpectralConvolution,
        shape: Sequence[int],
        P_world: Partition,
        block: torch.Tensor,
    ) -> None:
        self.kept, self.shape, self.block = layer.kept, shape, block
        ones = [1] * (len(shape) - 4)
        P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1, *ones])
        P_m = P_world.create_cartesian_topology_partition([1, 1, 1, P_world.size, *ones])
        self.to_modes, self.to_space = Repartition(P_x, P_m), Repartition(P_m, P_x)
        blocks = Blocks(self.kept[1], P_world.size)
        start, stop = blocks.block(P_world.rank or 0)
        self.weight = layer.weight[:, :, :, start:stop].detach()

    def __call__(self) -> torch.Tensor:
        last = len(self.shape) - 1
        f = torch.fft.rfft(self.block, dim=last)[..., : self.kept[-1]]
        for d in range(3, last):
            f = self._lowest(torch.fft.fft(f, dim=d), d)
        f = self._lowest(torch.fft.fft(self.to_modes(f.contiguous()), dim=2), 2)
        f = self.to_space(torch.fft.ifft(self._padded(product(f, self.weight), 2), dim=2))
        for d in range(3, last):
            f = torch.fft.ifft(self._padded(f, d), dim=d)
        return self.block + torch.fft.irfft(f, n=self.shape[last], dim=last)

    def _lowest(self, f: torch.Tensor, dim: int) -> torch.Tensor:
        own = centered(self.shape[dim], self.kept[dim - 2])
        shifted = torch.fft.fftshift(f, dim=dim)
        return shifted.narrow(dim, own.start, own.stop - own.start)

    def _padded(self, f: torch.Tensor, dim: int) -> torch.Tensor:
        own, n = centered(self.shape[dim], self.kept[dim - 2]), self.shape[dim]
        widths = [0, 0] * (f.dim() - 1 - dim) + [own.start, n - own.stop]
        return torch.fft.ifftshift(F.pad(f, widths), dim=dim)
