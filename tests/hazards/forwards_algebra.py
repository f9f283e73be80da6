"""Linear algebra, contractions, complex numbers, differences, and recurrences."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE, TOKENS, SIGNAL = "x: B C H W", "x: B T D", "x: B C L"


@forward(IMAGE)
class EinsumsOddlyWritten(nn.Module):
    """Without an arrow, with lists of dims, with spaces and capitals, and of more than two."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        a = torch.einsum("bchw,cd", x, self.w)
        b = torch.einsum(x, [0, 1, 2, 3], self.w, [1, 4], [0, 4, 3])
        c = torch.einsum("B C h w, b c h w -> B b C", [x, x.sin()])
        d = torch.einsum("bchw,cd,cd,bchw->bh", x, self.w, self.w, x)
        return a, b, c, d, torch.einsum("bchw->w", x), torch.einsum("...hw->...", x)


@forward(IMAGE)
class PhasesOfImages(nn.Module):
    """Python's complex numbers times tensors: ``exp(1j * t)``, ``angle``, ``conj``, ``.real``."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x):
        z = torch.exp(1j * self.rate * x) * (1 - 2j) + x.to(torch.complex128)
        u = torch.view_as_complex(torch.stack([x, x.roll(1, 2)], dim=-1)) / (z.abs() + 1)
        v = torch.conj(u) * z + u.conj().resolve_conj().mean(1, keepdim=True)
        return v.real + v.imag, u.angle(), torch.real(z).mean((2, 3)), torch.is_complex(u), z.sum()


@forward(IMAGE, may_refuse="torch does not dispatch an assignment to real or imag")
class WritesToParts(nn.Module):
    """``z.real`` and ``z.imag`` as views that are changed in place, and assigned."""

    def forward(self, x):
        z = torch.complex(x, x.flip(2)).clone()
        z.real.mul_(2.0)
        z.imag += 1.0
        torch.view_as_real(z)[..., 0].clamp_(-1, 1)
        return z.real.sin(), z.imag.sin()


@forward(SIGNAL)
class ComplexLayers(nn.Module):
    """Complex linear layers, norms and matrices: adjoints, ``vdot``, a ReLU of each part."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.b = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x):
        z = F.linear(torch.fft.fft(x, dim=-1).transpose(1, 2), self.w, self.b)
        z = torch.complex(F.relu(z.real), F.relu(z.imag))
        gram = z.mH @ z / z.shape[1]
        whole = torch.linalg.eigvalsh(gram + torch.eye(4)), torch.vdot(z[0, :, 0], z[0, :, 1]).abs()
        return torch.fft.ifft(z, dim=1).real, whole, z.abs().square().mean((0, 1)), gram.imag


@forward(IMAGE)
class Covariances(nn.Module):
    """``cov``, ``corrcoef`` and whitening over the pixels of all samples."""

    def forward(self, x):
        f = x.transpose(0, 1).flatten(1)
        cov = torch.cov(f) + 1e-3 * torch.eye(4)
        values, vectors = torch.linalg.eigh(cov)
        white = vectors @ torch.diag(values.rsqrt()) @ vectors.t() @ (f - f.mean(1, keepdim=True))
        return white.view(4, -1, *x.shape[2:]).transpose(0, 1), torch.corrcoef(f), cov.logdet()


@forward(TOKENS)
class Recurrences(nn.Module):
    """Loops of products: Chebyshev polynomials, Horner, power iteration, Sinkhorn."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(4, 8, 3))

    def forward(self, x):
        a = (x @ x.mT / 8).softmax(-1)
        cheb = [x, a @ x]
        for _ in range(2):
            cheb.append(2 * a @ cheb[-1] - cheb[-2])
        y = sum(t @ w for t, w in zip(cheb, self.theta, strict=True))
        v = F.normalize(x.new_ones(x.shape[0], x.shape[1], 1), dim=1)
        for _ in range(3):
            v = F.normalize(a @ v, dim=1)
        log = a.log()
        for _ in range(3):
            log = log - log.logsumexp(-1, keepdim=True)
            log = log - log.logsumexp(-2, keepdim=True)
        return y, v.mT @ a @ v, log.exp(), ((x * 0.1 + 1) * x + 2) * x


@forward(IMAGE)
class SeededNoise(nn.Module):
    """Numbers of a generator that the forward seeds: equal in every call, as filters of Fourier
    features are.
    """

    def forward(self, x):
        g = torch.Generator(device=x.device).manual_seed(7)
        w = torch.randn(4, 6, generator=g, dtype=x.dtype)
        y = torch.einsum("bchw,cd->bdhw", x, w)
        order = torch.randperm(x.shape[2], generator=g)
        return torch.cat([y.sin(), y.cos()], 1), x[:, :, order]


@forward(IMAGE, random=True)
class ForkedNoise(nn.Module):
    """Numbers drawn under ``fork_rng`` with a seed of their own, beside those of the network."""

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            noise = torch.rand(4, 1, 1)
        return x + noise.to(x) * torch.rand_like(x), F.dropout(x, 0.4, self.training)
