"""Let one rank of a world disagree, and collect the errors of all ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.errors import CollectiveTimeout, GpudistError, PlanMismatch, ShapeError
from gpudist.testing import run_distributed
from gpudist.testing.rank_pool import RankPool
from gpudist.transport.failure.channel import Failure
from gpudist.world.partition import Partition
from tests.faults.disagreement.acts import ACTS, follower_of, ranks_of, sequence
from tests.faults.operators import SAME
from tests.ops.dense import compare_every_call

LIMIT_S = 60.0


@dataclass(frozen=True)
class Told:
    """How a rank ended.

    Attributes:
        is_right: whether all calls that followed the agreement returned the same as before.
        kind: class of the error raised; empty if there was none.
        text: message of the error.
        seconds: time since the rank began to disagree.
    """

    kind: str
    text: str
    seconds: float
    is_right: bool = True


def disagree(P_world: Partition, name: str, kind: str, odd: int) -> Told:
    """Do it once as agreed, then disagree, then go on; how this rank ended."""
    torch.manual_seed(0)
    compare_every_call(P_world)
    agreed = {act: ACTS[act](P_world, SAME) for act in (name, follower_of(name))}
    P_world.barrier()
    begin_s = time.monotonic()
    is_right = True
    try:
        for act, meant in sequence(name, kind, P_world.rank == odd):
            found = ACTS[act](P_world, meant)
            is_right &= meant != SAME or _equal(found, agreed[act])
        # Whoever has sent all and received all learns of it with what comes next.
        for _ in range(3):
            P_world.allreduce_data([1])
    except GpudistError as error:
        # Errors of other ranks count too: later calls of this rank must not hang.
        P_world.wire.abort(Failure.from_exception(error, P_world.rank or 0))
        return Told(type(error).__name__, str(error), time.monotonic() - begin_s, is_right)
    return Told("", "", time.monotonic() - begin_s, is_right)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def every_rank(
    pool: Callable[[], RankPool], transport: str, name: str, kind: str, odd: int
) -> list[Told]:
    if transport == "loopback":
        return run_distributed(disagree, ranks_of(name), name, kind, odd, timeout=LIMIT_S)
    return pool().run(
        ranks_of(name), disagree, (name, kind, odd), limit_s=LIMIT_S, transport=transport
    )


def verdict(told: list[Told], odd: int, kind: str = "") -> str:
    """Return ``"detected"``, or the reason why not all ranks were told of this error.

    ``"refused"`` is as good: the documented ShapeError of blocks that do not belong together, with
    the same words on all ranks. ``"harmless"`` is another order of two operators whose messages go
    different ways, so that every rank gets the right numbers. ``"at the deadline"``, with what each
    rank did last, is what is left to ranks that wait for messages nobody sends.
    """
    kinds = {each.kind for each in told}
    if not all(each.is_right for each in told):
        return f"wrong numbers: {told}"
    if kinds == {""} and kind == "order":
        return "harmless"
    for rank, each in enumerate(told):
        if not each.kind:
            return f"silent: rank {rank} was told nothing, others {sorted(kinds)}"
        if not shows_both(each.text, odd):
            return f"one view: rank {rank} was told only {each.kind}: {each.text}"
    if kinds == {PlanMismatch.__name__}:
        return "detected"
    if kinds == {ShapeError.__name__} and len({each.text for each in told}) == 1:
        return "refused"
    if kinds == {CollectiveTimeout.__name__}:
        return "at the deadline"
    return f"other errors: {[(each.kind, each.text) for each in told]}"


def shows_both(text: str, odd: int) -> bool:
    """Whether a text has what two ranks meant, or what one meant before and means now."""
    ranks = set(re.findall(r"\brank (\d)\b", text))
    unlike = re.search(r"(dtypes|numbers of dims) \[[^]]+, [^]]+\]", text)
    changed = "agreed on as" in text and "is now" in text
    given = "got [" in text and "this worker's block of the global shape" in text
    implied = "imply" in text and re.search(r"rank \d has", text)
    return len(ranks | {str(odd)}) == len(ranks) > 1 or bool(unlike or implied) or changed or given
