"""Random programs of transforms, shifts, slices, zeros and writes to all of them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

NORMS = (None, "ortho", "forward")
DIMS = ((2, 3), (-2, -1), (3,), (2,), (1, 2), (1, 2, 3))
STEPS = ("slice", "slice", "shift", "fft", "ifft", "multiply", "zeros", "zeros", "zeros")
WRITES = ("set", "add", "scale", "copy", "inverse", "stop")


class Program(nn.Module):
    """A program of a seed; its results are the real and imaginary parts of all that it makes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.cdouble))

    def double(self) -> Program:
        return self

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.draw = random.Random(self.seed)
        self.inverses: list[torch.Tensor] = []
        if self.draw.random() < 0.7:
            dims = self.draw.choice([(2, 3), (2, 3), (3, 2), (1, 2, 3)])
            self.made = [torch.fft.rfftn(x, self._sizes(dims), dims, self.draw.choice(NORMS))]
        else:
            self.made = [torch.fft.fftn(torch.complex(x, 2 * x), dim=(2, 3))]
        for _ in range(self.draw.randint(2, 8)):
            name, t = self.draw.choice(STEPS + WRITES), self.draw.choice(self.made)
            getattr(self, f"_{name}")(t)
        found = (*(t.real + 2 * t.imag for t in self.made), *self.inverses)
        self.made, self.inverses = [], []
        return found

    def _sizes(self, dims: tuple[int, ...]) -> list[int] | None:
        return None if self.draw.random() < 0.6 else [self.draw.randint(3, 9) for _ in dims]

    def _index(self, t: torch.Tensor) -> tuple[slice, ...]:
        found: list[slice] = []
        for n in t.shape:
            start = self.draw.randint(0, n - 1)
            stop, step = self.draw.randint(start + 1, n), self.draw.choice([1, 1, 1, 2])
            some = slice(start - n, None) if start else slice(stop)
            own = self.draw.choice([slice(start, stop, step), some])
            found.append(slice(None) if self.draw.random() < 0.45 else own)
        return tuple(found)

    def _slice(self, t: torch.Tensor) -> None:
        self.made.append(t[self._index(t)])

    def _shift(self, t: torch.Tensor) -> None:
        shift = self.draw.choice([torch.fft.fftshift, torch.fft.ifftshift])
        self.made.append(shift(t, dim=self.draw.choice([None, 2, (2, 3), (1, 2)])))

    def _fft(self, t: torch.Tensor, function: Any = torch.fft.fftn) -> None:
        dims = self.draw.choice(DIMS)
        self.made.append(function(t, self._sizes(dims), dims, self.draw.choice(NORMS)))

    def _ifft(self, t: torch.Tensor) -> None:
        self._fft(t, torch.fft.ifftn)

    def _multiply(self, t: torch.Tensor) -> None:
        self.made.append(t * self.weight[0])

    def _zeros(self, t: torch.Tensor) -> None:
        shape = [*t.shape[:2], *(n + self.draw.randint(0, 5) for n in t.shape[2:])]
        kind = self.draw.randrange(3)
        zeros = [lambda: torch.zeros(shape, dtype=t.dtype), lambda: torch.zeros_like(t)]
        z = [*zeros, lambda: t.new_zeros(shape)][kind]()
        for _ in range(self.draw.randint(1, 3)):
            y = self.draw.choice(self.made)
            y = y[tuple([slice(min(a, b)) for a, b in zip(y.shape, z.shape, strict=True)])]
            y = y * self.weight[1] if self.draw.random() < 0.5 else y
            index: list[slice] = []
            for n, extent in zip(y.shape, z.shape, strict=True):
                start = self.draw.choice([0, self.draw.randint(0, extent - n)])
                index.append(slice(start, start + n))
            z[tuple(index)] = y
            if self.draw.random() < 0.2:
                self.made.append(torch.fft.fftshift(z, dim=2))
        self.made.append(z)

    def _set(self, t: torch.Tensor) -> None:
        t[self._index(t)] = 2.0

    def _add(self, t: torch.Tensor) -> None:
        t[self._index(t)] += self.weight[2]

    def _scale(self, t: torch.Tensor) -> None:
        t.mul_(1.5)

    def _copy(self, t: torch.Tensor) -> None:
        t.copy_(2 * self.draw.choice([y for y in self.made if y.shape == t.shape]))

    def _inverse(self, t: torch.Tensor) -> None:
        sizes = [self.draw.randint(4, 9) for _ in range(2)]
        self.inverses.append(torch.fft.irfftn(t, sizes, (2, 3), self.draw.choice(NORMS)))

    def _stop(self, t: torch.Tensor) -> None:
        with torch.no_grad():
            self.made += [3 * t, torch.fft.ifftshift(t, dim=2)]
