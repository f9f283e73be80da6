"""Batches of any length for tensor-parallel workers, only one of which reads the data.

``torchrun --standalone --nproc-per-node 4 examples/variable_batches.py``

The usual loader of tensor-parallel programs reads on rank 0, and all other ranks allocate
``torch.empty((micro_batch, seq_length))`` for the broadcast. This is correct only if every batch
has that shape. The first part shows what happens to other batches, on two ranks that are threads;
the second is the same program with ``stream_batches``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import gpudist
from gpudist import Partition
from gpudist.testing import run_distributed

MICRO_BATCH, SEQ_LENGTH = 4, 6
VOCABULARY = 1000


@dataclass
class Batch:
    """Tokens of documents, all padded to the longest document of the batch."""

    tokens: torch.Tensor
    mask: torch.Tensor
    sources: list[str]


def make_batch(step: int) -> Batch:
    """Return the batch of a step, with a new number of documents of new lengths."""
    generator = torch.Generator().manual_seed(step)
    rows = int(torch.randint(1, 9, (), generator=generator))
    lengths = torch.randint(1, 200, (rows,), generator=generator)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
    return Batch(tokens, mask, [f"document {step}.{row}" for row in range(rows)])


def loader(steps: int) -> Iterator[Batch]:
    yield from map(make_batch, range(steps))


def usual_loader(P: Partition, tokens: torch.Tensor) -> torch.Tensor:
    """Broadcast as tensor-parallel programs usually do: a setting gives the other ranks' shape."""
    if P.rank != 0:
        tokens = torch.empty((MICRO_BATCH, SEQ_LENGTH), dtype=torch.int64)
    P.communicator.broadcast(tokens, 0)
    return tokens


def show_the_usual_loader() -> list[str]:
    """Describe when the usual loader is correct, when it is silently wrong, and when it raises."""
    expected = torch.arange(MICRO_BATCH * SEQ_LENGTH).view(MICRO_BATCH, SEQ_LENGTH)
    _, got = run_distributed(usual_loader, 2, expected)
    assert torch.equal(got, expected)

    # The same number of tokens in another shape is received without an error, but as other
    # documents.
    sent = expected.view(SEQ_LENGTH, MICRO_BATCH)
    _, got = run_distributed(usual_loader, 2, sent)
    assert got.shape != sent.shape and got[0].tolist() == [0, 1, 2, 3, 4, 5]

    # For another number of tokens gpudist raises; other libraries hang, abort or read too far.
    try:
        run_distributed(usual_loader, 2, expected[:, :5].contiguous())
    except gpudist.PlanMismatch as error:
        refusal = str(error).split(":")[0]
    else:
        raise AssertionError("messages of two sizes were taken for one")
    return [
        f"{list(expected.shape)} tokens arrive as they are",
        f"{list(sent.shape)} tokens arrive as {list(got.shape)}: other documents",
        f"[{MICRO_BATCH}, 5] tokens do not arrive: {refusal}",
    ]


def train(P_world: Partition, steps: int) -> int:
    """Sum over a vocabulary split by rank, as a substitute for a network.

    Return the number of tokens seen.
    """
    assert P_world.rank is not None
    mine = torch.arange(VOCABULARY) % P_world.size == P_world.rank
    embedding = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)).double()
    seen = 0
    stream = gpudist.stream_batches(loader(steps) if P_world.rank == 0 else None, P_world)
    for step, batch in enumerate(stream):
        expected = make_batch(step)
        assert torch.equal(batch.tokens.cpu(), expected.tokens)
        assert torch.equal(batch.mask.cpu(), expected.mask)
        assert batch.sources == expected.sources
        part = (embedding * mine).to(P_world.device)[batch.tokens][batch.mask].sum()
        total = gpudist.invariant_sum(part, P_world)
        torch.testing.assert_close(total.cpu(), embedding[expected.tokens][expected.mask].sum())
        seen += int(expected.mask.sum())
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    P_world = gpudist.init()
    lines = show_the_usual_loader()
    seen = train(P_world, options.steps)
    if P_world.rank == 0:
        print("The usual loader, on two ranks:", *lines, sep="\n  ")
        print(
            f"stream_batches, on {P_world.size} ranks: {options.steps} batches of as many shapes, "
            f"{seen} tokens, equal on every rank"
        )


if __name__ == "__main__":
    main()
