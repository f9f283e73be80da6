"""Fourier transforms, complex numbers, and everything random."""

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
class FourierLayer(nn.Module):
    """FNO: rfft2, lowest modes of a plain ``zeros`` written by slices, irfft2."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(0.1 * torch.randn(4, 4, 3, 3, 2))
        self.high = nn.Parameter(0.1 * torch.randn(4, 4, 3, 3, 2))
        self.skip = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        f = torch.fft.rfft2(x)
        out = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.complex128, device=x.device)
        low, high = torch.view_as_complex(self.low), torch.view_as_complex(self.high)
        out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", f[:, :, :3, :3], low)
        out[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", f[:, :, -3:, :3], high)
        return F.gelu(torch.fft.irfft2(out, s=(h, w)) + self.skip(x))


@forward(IMAGE)
class GlobalFilter(nn.Module):
    """GFNet: a spectrum multiplied by a plane of parameters, orthonormal, interpolated to size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12, 6, 2))

    def forward(self, x):
        h, w = x.shape[2:]
        f = torch.fft.rfftn(x, dim=(2, 3), norm="ortho")
        plane = self.weight.permute(0, 3, 1, 2)
        plane = F.interpolate(plane, size=f.shape[2:], mode="bilinear", align_corners=True)
        weight = torch.view_as_complex(plane.permute(0, 2, 3, 1).contiguous())
        return torch.fft.irfftn(f * weight, s=(h, w), dim=(2, 3), norm="ortho")


@forward(IMAGE)
class SpectraByParts(nn.Module):
    """Amplitude and phase, ``fftshift``, transforms over channels and over the batch."""

    def forward(self, x):
        f = torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1))
        y = torch.fft.ifft2(
            torch.fft.ifftshift(torch.polar(f.abs() + 1, f.angle() * 0.5), dim=(2, 3))
        )
        z = torch.fft.fft(x, dim=1)
        return (
            y.real + y.imag,
            z.abs().square(),
            torch.log1p(f.abs()),
            torch.fft.rfft(x, dim=0).real,
        )


@forward(TOKENS)
class FNet(nn.Module):
    """Tokens mixed by the real part of a transform over features, then tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)


@forward(SIGNAL)
class LongConvolution(nn.Module):
    """A convolution as long as the signal, by a zero-padded transform (state-space layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.d = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        n = x.size(-1)
        kernel = torch.exp(-self.decay[:, None] * torch.arange(n).to(x))
        f = torch.fft.rfft(x, n=2 * n) * torch.fft.rfft(kernel, n=2 * n)
        return torch.fft.irfft(f, n=2 * n)[..., :n] + x * self.d.unsqueeze(-1)


@forward(SIGNAL, L=20, step=2)
class SpectrogramFeatures(nn.Module):
    """``torch.stft`` of mono signals, power, log, and a mel-like product."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(8, dtype=torch.float64))
        self.register_buffer("bank", torch.rand(3, 5))

    def forward(self, x):
        s = torch.stft(x.mean(1), 8, 4, window=self.window, center=True, return_complex=True)
        power = s.real**2 + s.imag**2
        return torch.log(torch.matmul(self.bank, power) + 1e-3)


@forward(IMAGE)
class ComplexWeights(nn.Module):
    """A complex parameter, ``torch.complex``, conj and a real view."""

    def __init__(self) -> None:
        super().__init__()
        self.re, self.im = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        w = torch.complex(self.re, self.im)
        z = torch.einsum("oi,bihw->bohw", w, torch.complex(x, x.flip(3)))
        return (z * z.conj()).real, torch.view_as_real(z).sum(-1), z.mean((2, 3))


@forward(IMAGE)
class ZeroDropout(nn.Module):
    """Dropout of probability 0 and 1, and layers of it in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.path = nn.Dropout(0.0), nn.Dropout2d(1.0)

    def forward(self, x):
        return self.drop(x).sin() + self.path(x * 2), F.dropout(x, 0.5, training=False)


@forward(IMAGE, random=True)
class DropoutsOfEveryKind(nn.Module):
    """Dropout of cells, of channels, alpha, in place and after a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.channels = nn.Dropout(0.5), nn.Dropout2d(0.5)
        self.alpha = nn.AlphaDropout(0.3)

    def forward(self, x):
        y = self.drop(x)
        z = F.dropout(x * 2, 0.3, self.training, inplace=True)
        return y + self.channels(x), z, self.alpha(x), self.drop(x.flatten(1))


@forward(IMAGE, random=True)
class StochasticDepth(nn.Module):
    """DropPath: ``new_empty(...).bernoulli_()`` of shape (B, 1, 1, 1), scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        if self.training:
            shape = (x.shape[0],) + (1,) * (x.ndim - 1)
            mask = x.new_empty(shape).bernoulli_(0.5)
            y = y * mask.div_(0.5)
        return x + y


@forward(IMAGE, random=True)
class Reparametrized(nn.Module):
    """A VAE's sample: ``randn_like`` of a standard deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x):
        mean, logvar = self.conv(x).chunk(2, 1)
        std = torch.exp(0.5 * logvar.clamp(-5, 5))
        return mean + std * torch.randn_like(std), (mean**2 + logvar.exp() - logvar).mean()


@forward(IMAGE, random=True)
class RandomFactories(nn.Module):
    """``torch.rand`` and relatives by the input's shape; one draw must be the same everywhere."""

    def forward(self, x):
        b, _, h, w = x.shape
        noise = torch.randn(b, 1, h, w, dtype=x.dtype, device=x.device)
        keep = torch.rand(b, device=x.device) < 0.5
        order = torch.randperm(w, device=x.device)
        steps = torch.randint(0, h, (b,))
        y = x + 0.1 * noise + steps.view(-1, 1, 1, 1)
        return y * keep.view(-1, 1, 1, 1), x[..., order], torch.normal(0.0, 1.0, (3,)) + x.mean()


@forward(IMAGE, random=True)
class RandomMethods(nn.Module):
    """``bernoulli``, ``uniform_``, ``normal_``, ``multinomial``, ``rrelu`` and gumbel noise."""

    def forward(self, x):
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        noise = torch.empty_like(x).uniform_(-1, 1) + x.clone().detach().normal_()
        soft = F.gumbel_softmax(x, tau=1.0, dim=1)
        return x * mask, x + noise, soft, F.rrelu(x, training=self.training)


@forward(IMAGE, random=True)
class PythonDecides(nn.Module):
    """Stochastic depth by one number drawn for the whole network, which all must agree on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand(1).item() > 0.5:
                x = x + layer(x).tanh()
        return x


@forward(TOKENS, random=True)
class MaskedTokens(nn.Module):
    """MAE: tokens shuffled by ``argsort`` of noise, some kept, gathered, put back."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.mix = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 8)

    def forward(self, x):
        b, t, d = x.shape
        order = torch.rand(b, t, device=x.device).argsort(dim=1)
        back, kept = order.argsort(dim=1), order[:, : t // 2]
        y = self.mix(torch.gather(x, 1, kept.unsqueeze(-1).repeat(1, 1, d)))
        y = torch.cat([y, self.token.repeat(b, t - t // 2, 1)], dim=1)
        return torch.gather(y, 1, back.unsqueeze(-1).expand(-1, -1, d))


@forward(TOKENS, random=True)
class AttentionWithDropout(nn.Module):
    """Dropout in attention, by ``nn.MultiheadAttention`` and by an encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x):
        y, _ = self.attention(x, x, x)
        return self.layer(y)


@forward(IMAGE)
class OlderSpectralNorm(nn.Module):
    """``torch.nn.utils.spectral_norm``: a hook that writes buffers and sets ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.utils.spectral_norm(nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        return self.conv(x).tanh()
