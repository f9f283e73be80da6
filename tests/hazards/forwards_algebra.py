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
class SolvedSystems(nn.Module):
    """Ridge regression over pixels: ``solve``, ``cholesky``, a triangular solve, ``lstsq``."""

    def forward(self, x):
        b, c, h, w = x.shape
        f = x.flatten(2)
        a = f @ f.mT / (h * w) + 0.1 * torch.eye(c, dtype=x.dtype, device=x.device)
        low = torch.linalg.cholesky(a)
        white = torch.linalg.solve_triangular(low, f, upper=False).view(b, c, h, w)
        first = torch.linalg.solve(a, f.mean(2, keepdim=True)).squeeze(-1)
        again = torch.cholesky_solve(f.mean(2, keepdim=True), low).squeeze(-1)
        return white, first, again, torch.linalg.lstsq(a, f[..., :3]).solution


@forward(IMAGE)
class Decompositions(nn.Module):
    """Eigenvalues, singular values, determinants, inverses, exponentials of covariances."""

    def forward(self, x):
        f = x.flatten(2)
        a = torch.matmul(f, f.transpose(1, 2)) / f.shape[2] + torch.diag(x.new_ones(4))
        sign, logabs = torch.linalg.slogdet(a)
        values, vectors = torch.linalg.eigh(a)
        root = vectors @ torch.diag_embed(values.sqrt()) @ vectors.mT
        return (
            root, sign * logabs, torch.linalg.svdvals(x), torch.linalg.matrix_exp(-a),
            torch.linalg.matrix_power(a, 3), torch.linalg.pinv(a), torch.linalg.eigvalsh(a),
            torch.linalg.cond(a), torch.det(a), torch.linalg.norm(x, "nuc", dim=(2, 3)),
        )  # fmt: skip


@forward(IMAGE)
class ProductsOfEveryKind(nn.Module):
    """``addmm``, ``addbmm``, ``mv``, ``dot``, ``inner``, ``outer``, ``vdot``, ``multi_dot``."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        f = x.flatten(2)
        one, rows = f[0], x.mean((0, 1))
        a = torch.addmm(one, self.w, one, beta=0.5, alpha=2) + torch.mm(self.w, one)
        b = torch.mv(one.t(), self.v) + torch.addmv(one[0], one.mT, self.v)
        c = torch.dot(one[0], one[1]) + torch.inner(one, one).trace() + one[0] @ one[2]
        d = torch.addbmm(self.w, f, f.mT, alpha=0.1) + torch.outer(self.v, x.mean((0, 2, 3)))
        e = torch.linalg.multi_dot([self.w, one, one.T]) + torch.chain_matmul(self.w, self.w)
        g = torch.addr(rows, rows[:, 0], rows[0]) + torch.vdot(one[0], one[3])
        return a, b, c, d, e, g, F.bilinear(f.mT, f.mT, self.w[None].expand(3, 4, 4), self.v[:3])


@forward("x: B 3 H W", "y: B 3 H W")
class CrossProducts(nn.Module):
    """Normals of a depth map: cross products over channels, angles between vectors."""

    def forward(self, x, y):
        n = F.normalize(torch.cross(x, y, dim=1), dim=1)
        m = torch.linalg.cross(x, n, dim=1) * torch.linalg.vecdot(x, y, dim=1).unsqueeze(1)
        angle = torch.atan2(torch.linalg.norm(n, dim=1), (x * y).sum(1))
        return n, m, torch.rad2deg(angle), F.cosine_similarity(x, y), F.pairwise_distance(x, y)


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


@forward(IMAGE)
class DiagonalsAndTriangles(nn.Module):
    """``diagonal``, ``diag_embed``, ``tril``, ``triu`` and scatters of parts over spatial dims."""

    def forward(self, x):
        d = torch.diagonal(x, offset=1, dim1=2, dim2=3)
        low, up = x.tril(-1), torch.triu(x, diagonal=2)
        y = x.select_scatter(x[:, :, 0] * 2, dim=2, index=1)
        y = torch.slice_scatter(y, x[..., 2:4].sin(), dim=3, start=5, end=7)
        return d, low * up.sum(), torch.diag_embed(d.mean(2)), y, x.diagonal(0, -2, -1).sum(-1)


@forward(IMAGE)
class FiniteDifferences(nn.Module):
    """``gradient``, ``diff`` of higher order and with ends, ``trapezoid`` over both dims."""

    def forward(self, x):
        gy, gx = torch.gradient(x, dim=(2, 3), spacing=0.5)
        ends = torch.diff(x, dim=2, prepend=x[:, :, :1], append=x[:, :, -1:])
        area = torch.trapezoid(torch.trapezoid(x, dx=0.1, dim=3), dim=2)
        return gy + gx, x.diff(n=2, dim=3), ends, area, torch.cumulative_trapezoid(x, dim=2)


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
