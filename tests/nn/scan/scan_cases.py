"""Recurrences and convolutions over whole sequences, step by step and document by document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

DOCUMENTS = [3, 1, 5, 2]
LENGTH = sum(DOCUMENTS)


class Form(NamedTuple):
    """Form of a recurrence.

    Attributes:
        a, b: global shapes of factors and terms.
        dim: dim of the sequence.
        matrix: whether factors are matrices.
        dtype: of both.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    dim: int = 1
    matrix: bool = False
    dtype: torch.dtype = torch.float64


FORMS = {
    "scalar": Form((2, LENGTH, 3, 1, 1), (2, LENGTH, 3, 2, 4)),
    "vector": Form((2, LENGTH, 3, 2, 1), (2, LENGTH, 3, 2, 4)),
    "channels first": Form((2, 3, LENGTH, 2), (2, 3, LENGTH, 2), -2),
    "constant": Form((1, 1, 3), (2, LENGTH, 3)),
    "complex": Form((2, LENGTH, 3), (2, LENGTH, 3), dtype=torch.complex128),
    "matrix": Form((2, LENGTH, 3, 3), (2, LENGTH, 3, 2), matrix=True),
    "complex matrix": Form((1, LENGTH, 2, 2), (2, LENGTH, 2, 2), 1, True, torch.complex128),
}


def ids_of(documents: Sequence[int] = DOCUMENTS, batch: int = 2) -> torch.Tensor:
    """Return numbers of documents, other ones in each sequence."""
    numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    return torch.stack([numbers.roll(2 * i) for i in range(batch)])


def step_by_step(
    a: torch.Tensor, b: torch.Tensor, form: Form, reverse: bool, ids: torch.Tensor | None
) -> torch.Tensor:
    """Scan each document of each sequence alone, one step after the other."""
    a = a.expand(*(m if d < b.dim() - 2 * form.matrix else n for d, (n, m) in enumerate(
        zip(a.shape, b.shape, strict=True)
    )))  # fmt: skip
    dim = form.dim % b.dim()
    sequences: list[torch.Tensor] = []
    for i in range(len(b)):
        bounds = [0, b.shape[dim]]
        if ids is not None:
            bounds[1:1] = (ids[i].diff().nonzero().flatten() + 1).tolist()
        states: list[torch.Tensor] = []
        for start, stop in pairwise(bounds):
            steps = range(start, stop)
            h, found = torch.zeros((), dtype=b.dtype), dict[int, torch.Tensor]()
            for t in reversed(steps) if reverse else steps:
                term, factor = b[i].select(dim - 1, t), a[i].select(dim - 1, t)
                old = h if h.dim() else torch.zeros_like(term)
                h = found[t] = (factor @ old if form.matrix else factor * old) + term
            states += [found[t] for t in steps]
        sequences.append(torch.stack(states, dim - 1))
    return torch.stack(sequences)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, documents: list[int]
) -> torch.Tensor:
    """Convolve each document alone by torch's convolution."""
    parts = x.split(documents, 2)
    padded = [F.pad(part, (weight.shape[1] - 1, 0)) for part in parts]
    found = [F.conv1d(x, weight.unsqueeze(1), bias, groups=len(weight)) for x in padded]
    return torch.cat(found, 2)
