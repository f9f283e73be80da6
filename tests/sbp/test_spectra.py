"""Fourier layers of converted networks: kept modes move, and nothing tells it but the bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import gpudist
from gpudist.errors import ConversionError
from gpudist.exchange import all_reduce
from gpudist.sbp.spectrum import Spectrum
from gpudist.world.partition import CartesianPartition, Partition
from tests.convert.training import assert_as_alone
from tests.nn.compare import (
    assert_block_of,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed
from tests.sbp.spectral_programs import Program

CHANNELS = 3


def complex_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.cdouble))


class Centered(nn.Module):
    """The lowest modes of a shifted spectrum, in any number of dims, multiplied and added."""

    def __init__(self, kept: tuple[int, ...]) -> None:
        super().__init__()
        self.kept = kept
        self.weight = complex_parameter(CHANNELS, CHANNELS, *kept)

    def double(self) -> Centered:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = list(range(2, x.dim()))
        f = torch.fft.fftshift(torch.fft.rfftn(x, dim=dims), dim=dims[:-1])
        starts = [f.size(d) // 2 - n // 2 for d, n in zip(dims, self.kept[:-1], strict=False)]
        rows = [slice(start, start + n) for start, n in zip(starts, self.kept, strict=False)]
        modes = (slice(None), slice(None), *rows, slice(self.kept[-1]))
        out = torch.zeros(f.shape, dtype=f.dtype, device=x.device)
        out[modes] = torch.einsum("bi...,io...->bo...", f[modes], self.weight)
        out = torch.fft.ifftshift(out, dim=dims[:-1])
        return x + torch.fft.irfftn(out, s=x.shape[2:], dim=dims)


class Corners(nn.Module):
    """Two corners of one spectrum, as in the first code of Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (complex_parameter(CHANNELS, CHANNELS, 3, 4) for _ in range(2))

    def double(self) -> Corners:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft2(x)
        out = torch.zeros(*f.shape, dtype=torch.cdouble, device=x.device)
        for rows, weight in ((slice(3), self.low), (slice(-3, None), self.high)):
            out[:, :, rows, :4] = torch.einsum("bixy,ioxy->boxy", f[:, :, rows, :4], weight)
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


class OfComplexNumbers(Corners):
    """Transforms of complex numbers, with norms and zeros of another constructor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, 0.5 * x)
        f = torch.fft.fftshift(torch.fft.fftn(z, dim=(-2, -1), norm="ortho"), dim=(-2, -1))
        out = torch.zeros_like(f)
        n, m = (extent // 2 for extent in f.shape[2:])
        out[:, :, n - 1 : n + 2, m - 2 : m + 2] = torch.einsum(
            "bixy,ioxy->boxy", f[:, :, n - 1 : n + 2, m - 2 : m + 2], self.low
        )
        out = torch.fft.ifftshift(out, dim=(-2, -1))
        y = torch.fft.ifftn(out, dim=(-2, -1), norm="ortho")
        return y.real + y.imag + self.high.abs().sum() * x


class Resampled(Corners):
    """Modes of another size of the result, without a product between, and ``new_zeros``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfftn(x, dim=[2, 3], norm="forward")
        shape = (*f.shape[:2], 24, 11)
        out = f.new_zeros(shape)
        out[:, :, :4, :6] = f[:, :, :4, :6]
        out[..., -4:, :6] = f[..., -4:, :6]
        y = torch.fft.irfftn(out, s=[24, 20], dim=[2, 3], norm="forward")
        return y * self.low.real.mean() + self.high.imag.sum()


class Filter(Corners):
    """A product with the whole spectrum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft2(x, norm="ortho")
        weight = self.low.sum((0, 1, 2))[:, None, None] + self.high.sum()
        y = f * weight.sum()
        return x + torch.fft.irfft2(y, s=x.shape[-2:], norm="ortho")


class OneDim(Corners):
    """A transform of the only split dim, and one of a whole dim."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x
        for dim in (2, 3):
            f = torch.fft.rfft(x, dim=dim).transpose(dim, 3)
            shape = (*f.shape[:3], x.shape[dim] // 2 + 1)
            out = torch.zeros(shape, dtype=torch.cdouble, device=x.device)
            weight = self.low.sum(2) if dim == 2 else self.high.sum(2)
            out[..., :4] = torch.einsum("bihx,iox->bohx", f[..., :4], weight)
            found = found + torch.fft.irfft(out, n=x.shape[dim]).transpose(dim, 3)
        return found


class Written(Corners):
    """Everything that writes to spectra, to slices of them, and to zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft2(x)
        low, high = f[:, :, :3, :4], f[:, :, -3:, :4]
        low *= self.low[0]  # Reaches f, but not high.
        f[:, :, 5:7, :4] *= 2
        f[:, :, -1] += 1  # Reaches high.
        y = torch.fft.irfft2(f, s=x.shape[-2:])
        out = torch.zeros(*f.shape, dtype=f.dtype)
        out[:, :, :3, :4] = low
        out[:, :, 1:4, :4] = high * self.high[0]
        out[:, :, 8:11, 1:5] = low
        shifted = torch.fft.fftshift(out, dim=2)
        out[:, :, 0] = 0  # Does not reach shifted.
        z = torch.fft.irfft2(torch.fft.ifftshift(shifted, dim=2), s=x.shape[-2:])
        filled = torch.zeros_like(f)
        filled[:] = f
        turned = torch.fft.fftshift(filled, dim=2)
        turned[:, :, 1:2, 1:2] += 1
        z = z + torch.fft.irfft2(turned, s=x.shape[-2:])
        filled = torch.zeros(x.shape, dtype=f.dtype)
        filled[:] = torch.complex(x, 2 * x)
        z = z + torch.fft.fft2(torch.fft.fftshift(filled, dim=2)).imag
        return x + y + z + torch.fft.irfft2(out, s=x.shape[-2:])


class Dropped(Corners):
    """Slices that overlap are written to after the spectrum itself is dropped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.slices_of(torch.fft.rfft2(x))
        low *= self.low[0]
        high += self.high.sum()
        low.mul_(2)
        return low.abs() + high.abs()

    def slices_of(self, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return f[:, :, :3, :4], f[:, :, 1:4, 1:5]


class Single(Corners):
    """Cells of one sample and one row, of three transformed dims."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfftn(x, dim=(1, 2, 3))
        weight = self.low.sum() + self.high.sum()
        y = torch.fft.ifftn(f[-1:, :, :1, 1:2] * weight, s=(5, 6), dim=(1, 2))
        return y.real + torch.fft.irfftn(f[:1, :, 1:6, :2], s=(5, 6, 1), dim=(1, 2, 3))


class Zeros(Corners):
    """Zeros with an axis of another meaning, added to, returned, and assigned whole tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        f = torch.fft.rfft2(x)
        zeros = torch.zeros(f.shape, dtype=torch.cdouble)
        mine = torch.zeros_like(f)
        mine[0] = self.low[0, 0, 0, 0]
        mine[:, 1:2, ::2, :4] = f[:, 1:2, ::2, :4]
        plain = torch.zeros(2, 3, dtype=torch.cdouble)
        plain[:, 1:] = self.high[0, 0, :2, :2]
        return (zeros + f).abs(), mine.real, f.real, torch.view_as_real(plain)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "2-D": lambda: Centered((6, 4)),
    **{
        kind.__name__: kind
        for kind in (
            Corners,
            OfComplexNumbers,
            Resampled,
            Filter,
            OneDim,
            Written,
            Dropped,
            Single,
            Zeros,
        )
    },
}


@pytest.mark.parametrize("name", LAYERS)
@distributed(ranks=4, transports=["loopback"])
def test_layers_are_the_networks_own(P_world: Partition, name: str) -> None:
    """Values, gradients and trained weights, on two, on three uneven and on four blocks."""
    for shape, x in (
        ([1, 1, 2, 1], (2, CHANNELS, 16, 12)),
        ([1, 1, 3, 1], (1, CHANNELS, 17, 13)),
        ([1, 1, 2, 2], (2, CHANNELS, 15, 14)),
        ([1, 1, 1, 3], (2, CHANNELS, 16, 12)),
        ([2, 1, 2, 1], (3, CHANNELS, 16, 12)),
    ):
        assert_as_alone(LAYERS[name], grid(P_world, shape), [x], steps=1)


@distributed(ranks=4, transports=["loopback"])
def test_three_dims(P_world: Partition) -> None:
    for shape in ([1, 1, 2, 2, 1], [1, 1, 1, 2, 2], [1, 1, 1, 3, 1]):
        x = (1, CHANNELS, 8, 9, 10)
        assert_as_alone(lambda: Centered((4, 4, 3)), grid(P_world, shape), [x], steps=1)


@pytest.mark.parametrize("seed", range(12))
@distributed(ranks=4, transports=["loopback"])
def test_programs(P_world: Partition, seed: int) -> None:
    """Random programs compute what they compute alone, if autograd takes them."""
    shape, x = [
        ([1, 1, 2, 1], (2, 3, 8, 6)),
        ([1, 1, 3, 1], (1, 2, 7, 9)),
        ([1, 1, 2, 2], (2, 2, 7, 6)),
        ([2, 1, 2, 1], (3, 2, 6, 6)),
    ][seed % 4]
    for number in range(8 * seed, 8 * seed + 8):
        try:
            whole = random_like_all(x, 1).requires_grad_()
            torch.stack([y.sum() for y in Program(number)(whole)]).sum().backward()
        except RuntimeError as error:
            # It writes to what backward needs.
            assert "modified by an inplace operation" in str(error)
            continue
        assert_as_alone(partial(Program, number), grid(P_world, shape), [x], steps=1)


def layer_on(
    P_x: CartesianPartition, shape: tuple[int, ...], make: Callable[[], nn.Module]
) -> tuple[nn.Module, Any, torch.Tensor, torch.Tensor]:
    """Return a network, the same converted, the whole input, and this worker's block."""
    torch.manual_seed(3)
    alone = make()
    whole = random_like_all(shape, 1).requires_grad_()
    return alone, gpudist.distribute(copy.deepcopy(alone), P_x), whole, own_block(whole, P_x)


def sent_bytes(P_world: Partition, call: Callable[[], Any]) -> int:
    """Return the bytes that all ranks send for a call."""

    def so_far() -> int:
        return sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))

    before = so_far()
    call()
    return int(all_reduce(torch.tensor([so_far() - before]), P_world))


@pytest.mark.parametrize("kind", ["2-D", "Corners", "OfComplexNumbers"])
@distributed(ranks=[2, 4], transports=["loopback"])
def test_bytes(P_world: Partition, kind: str) -> None:
    """The kept modes of the whole dims move there and back, each ``(P - 1) / P`` times.

    Two corners share them. ``plan_of`` predicts the same.
    """
    P_x, shape = grid(P_world, [1, 1, P_world.size, 1]), (4, CHANNELS, 16, 12)
    make = LAYERS[kind]
    alone, net, whole, block = layer_on(P_x, shape, make)
    net(block)
    sent = sent_bytes(P_world, lambda: net(block))
    cells = math.prod(shape[:3]) * 4
    assert sent == 2 * 16 * cells * (P_world.size - 1) // P_world.size
    planned = gpudist.plan_of(alone, P_x, whole, ranks=P_world.rank).sent_bytes
    assert int(all_reduce(torch.tensor([planned]), P_world)) == sent


@distributed(ranks=[2, 3], transports=["loopback"])
def test_double_backward(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, P_world.size, 1])
    alone: Any
    alone, net, whole, block = layer_on(P_x, (2, CHANNELS, 13, 12), lambda: Centered((6, 4)))
    for y, x in ((alone(whole), whole), (net(block).to_local(), block)):
        (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (gradient**2).sum().backward()
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "second", 1e-8)
    assert_block_of(net.weight.grad, alone.weight.grad, (slice(None),) * 4, "weight", 1e-8)


class Modes(Corners):
    """Computes spectra in other modes of autograd than they were made in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f, g, h = (torch.fft.rfft2(x * n) for n in (1, 2, 3))
        with torch.no_grad():
            f.abs()
            stopped = torch.fft.fftshift(f, dim=2)
            low = g[..., :4]
        with torch.inference_mode():
            g.abs()
            h[..., :4].abs()
        assert f.requires_grad and not stopped.requires_grad
        low_again = g[..., :4] + h[..., :4] * self.low[0, 0, 0]
        out = torch.zeros_like(f)
        out[..., :4] = low + low_again * self.low.sum() + stopped[..., :4] * self.high.sum()
        return torch.fft.irfft2(f + out, s=x.shape[-2:])


class Checkpointed(Corners):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def back(f: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(f)
            out[:, :, :3, :4] = f[:, :, :3, :4] * self.low[0]
            out[:, :, -3:, :4] = f[:, :, -3:, :4] * self.high[0]
            return torch.fft.irfft2(out, s=x.shape[-2:])

        return torch.utils.checkpoint.checkpoint(back, torch.fft.rfft2(x), x, use_reentrant=False)


@pytest.mark.parametrize("kind", [Modes, Checkpointed])
@distributed(ranks=[2], transports=["loopback"])
def test_modes_of_autograd(P_world: Partition, kind: Any) -> None:
    assert_as_alone(kind, grid(P_world, [1, 1, 2, 1]), [(2, CHANNELS, 16, 12)], steps=1)


class Watched(Corners):
    """Registers a hook on a spectrum, and reads it as a text on one rank."""

    hooked = "before"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft2(x)
        if self.hooked == "before":
            f.register_hook(lambda g: 2 * g)
        low = f[:, :, :3, :4] * self.low[0]
        if self.hooked == "after":
            f.register_hook(lambda g: 2 * g)
        if self.hooked == "later":
            _ = f.abs()
            f.retain_grad()
        return low.abs()


@distributed(ranks=[2], transports=["loopback"])
def test_gradients_of_a_spectrum(P_world: Partition) -> None:
    """A hook sees all of the gradient, or is refused because slices have been taken."""
    P_x = grid(P_world, [1, 1, 2, 1])
    assert_as_alone(Watched, P_x, [(2, CHANNELS, 16, 12)], steps=1)
    for hooked in ("after", "later"):
        _, net, _, block = layer_on(P_x, (2, CHANNELS, 16, 12), Watched)
        net.hooked = hooked
        with pytest.raises(RuntimeError, match="before you use the spectrum"):
            net(block)


@distributed(ranks=[2, 4], transports=["loopback"])
def test_one_rank_keeps_a_spectrum(P_world: Partition) -> None:
    """A rank sends the same, whatever it has not freed yet."""
    kept: list[torch.Tensor] = []

    class Kept(Dropped):
        def slices_of(self, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if P_world.rank == 1:
                kept.append(f)
            return f[:, :, :3, :4], f[:, :, :3, :4]

    P_x = grid(P_world, [1, 1, P_world.size, 1])
    assert_as_alone(Kept, P_x, [(2, CHANNELS, 16, 12)], steps=1)


class Read(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft2(x)
        assert type(f) is Spectrum
        self.read(f)
        return f


@distributed(ranks=[3], transports=["loopback"])
def test_what_is_known_before(P_world: Partition) -> None:
    """One rank alone may ask for a text, the shape and the layout, which the result then has."""
    P_x, known = grid(P_world, [1, 1, 3, 1]), []

    def read(f: Any) -> None:
        if P_world.rank == 1:
            assert "(shape=[4, 2, 9, 5], dtype=torch.complex128, not computed" in f"{f} {f!r}"
            assert tuple(f.shape) == (4, 2, 9, 5) and f.requires_grad
            known.append((f.sbp, f.placement, f.global_layout))
        with pytest.raises(AttributeError, match="no attribute 'colour'"):
            _ = f.colour

    _, net, _, block = layer_on(P_x, (4, 2, 9, 8), lambda: Read(read))
    y = net(block)
    assert type(y) is gpudist.GlobalTensor
    assert all(one == (y.sbp, y.placement, y.global_layout) for one in known)


@distributed(ranks=[2], transports=["loopback"])
def test_errors_are_torchs_own(P_world: Partition) -> None:
    """Arguments that torch refuses, and functions without a rule."""
    P_x = grid(P_world, [1, 1, 2, 1])

    def fails(f: Any) -> None:
        with pytest.raises((RuntimeError, IndexError)):
            torch.fft.fftn(f, dim=(2, 2))
        with pytest.raises((RuntimeError, IndexError)):
            torch.fft.irfftn(f, s=(0, 4), dim=(2, 3))
        with pytest.raises(IndexError):
            torch.fft.fft(f, dim=7)
        with pytest.raises((RuntimeError, ConversionError)):
            torch.fft.fft(f, norm="none")

    _, net, _, block = layer_on(P_x, (2, 2, 8, 8), lambda: Read(fails))
    net(block)


@distributed(ranks=[2], transports=["host"], timeout_s=300)
def test_recorded(P_world: Partition) -> None:
    """A compiled network has the same spectra in its graph."""
    P_x = grid(P_world, [1, 1, 2, 1])
    alone, net, whole, block = layer_on(P_x, (2, CHANNELS, 16, 12), Corners)
    y = gpudist.compiled(net, backend="eager")(block)
    (y.to_local() ** 2).sum().backward()
    (alone(whole) ** 2).sum().backward()
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "gradient", 1e-8)
