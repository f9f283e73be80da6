"""Real text of random lengths: the documentation that comes with Python, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F

END = 256
VOCABULARY = 257
IGNORED = -100


@dataclass
class Batch:
    """Samples padded to the longest.

    Attributes:
        tokens: the tokens, ``[B, L]``.
        targets: the next token of every token, ``[B, L]``; ``IGNORED`` after a sample's end.
    """

    tokens: torch.Tensor
    targets: torch.Tensor


class Documentation:
    """Samples from the topics of ``help()``, at random positions and of random lengths.

    Args:
        samples: number of samples in a batch.
        shortest, longest: range of tokens in a sample.
        seed: seed of positions and lengths.
    """

    def __init__(self, samples: int, shortest: int, longest: int, seed: int) -> None:
        self._samples, self._lengths, self._seed = samples, (shortest, longest), seed
        numbers: list[int] = []
        for name in sorted(topics):
            numbers += [*topics[name].encode(), END]
        self._text = torch.tensor(numbers)

    def batch(self, step: int, row: int) -> Batch:
        """Return the samples of a row of workers at a step."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 1009 + row)
        shortest, longest = self._lengths
        found: list[torch.Tensor] = []
        for _ in range(self._samples):
            length = int(torch.randint(shortest, longest + 1, (), generator=generator))
            places = len(self._text) - length
            start = int(torch.randint(places, (), generator=generator))
            found.append(self._text[start : start + length + 1])
        pad = torch.nn.utils.rnn.pad_sequence
        return Batch(
            pad([text[:-1] for text in found], True, END),
            pad([text[1:] for text in found], True, IGNORED),
        )


def joined(batches: Sequence[Batch]) -> Batch:
    """Join the samples of all batches, in order, padded to the longest of all."""
    longest = max(batch.tokens.shape[1] for batch in batches)

    def padded(x: torch.Tensor, value: int) -> torch.Tensor:
        return F.pad(x, (0, longest - x.shape[1]), value=value)

    return Batch(
        torch.cat([padded(batch.tokens, END) for batch in batches]),
        torch.cat([padded(batch.targets, IGNORED) for batch in batches]),
    )
