"""Random calls of every operator: results, forward and backward, and the messages sent."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import torch

import gpudist
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.faults.operators import drawn

RANKS = (2, 3, 4, 6)
CHUNK = 25


def record(count: int, folder: Path, is_first: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for first in range(0, count, CHUNK):
        size = RANKS[first // CHUNK % len(RANKS)]
        numbers = range(first, min(first + CHUNK, count))
        by_rank = run_distributed(_calls, size, numbers, timeout=60)
        for number, each in zip(numbers, zip(*by_rank, strict=True), strict=True):
            found[f"{number} {each[0][0]} on {size}"] = [one[1:] for one in each]
    return found


def _calls(P_world: Partition, numbers: range) -> list[tuple[Any, ...]]:
    return [_call(P_world, number) for number in numbers]


def _call(P_world: Partition, number: int) -> tuple[Any, ...]:
    """The name, and for forward and backward the tensor, the messages and the bytes."""
    call = drawn(random.Random(f"frozen {number}"), P_world)
    rank = P_world.rank
    assert rank is not None
    x = call.inputs[rank].clone()
    x.requires_grad_(x.is_floating_point() or x.is_complex())
    before = sent(P_world)
    y = call.apply(x)
    forward = [digest(y), *_difference(sent(P_world), before)]
    if not any(each.is_floating_point() or each.is_complex() for each in call.inputs):
        return call.name, forward
    before = sent(P_world)
    weight = torch.arange(y.numel()).reshape(y.shape).to(y.dtype)
    (gradient,) = torch.autograd.grad(y, x, weight, materialize_grads=True)
    return call.name, forward, [digest(gradient), *_difference(sent(P_world), before)]


def sent(P_world: Partition) -> list[int]:
    """Messages, sent bytes and received bytes of this rank so far."""
    rows = list(gpudist.stats(P_world=P_world))
    return [
        sum(row.messages for row in rows),
        sum(row.sent_bytes for row in rows),
        sum(row.received_bytes for row in rows),
    ]


def _difference(now: list[int], before: list[int]) -> list[int]:
    return [a - b for a, b in zip(now, before, strict=True)]


def digest(x: torch.Tensor) -> str:
    """Shape, dtype and every bit; of tensors without cells only that there are none."""
    if not x.numel():
        return "none"
    cells = x.detach().contiguous().resolve_conj().flatten().view(torch.uint8).numpy().tobytes()
    name = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    return f"{name} {hashlib.sha256(cells).hexdigest()[:16]}"
