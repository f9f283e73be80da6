"""Run a configuration on a world of ranks, and judge how its ranks ended."""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch

import gpudist
from gpudist.errors import PartitionError, ShapeError, TransportError
from gpudist.testing import run_distributed
from gpudist.testing.rank_pool import RankPool, RanksFailed
from gpudist.world.partition import Partition
from tests.every import EVERY
from tests.fuzz.case import Case, from_json, observed_refusal_of_torch, to_json
from tests.fuzz.families import by_layer
from tests.fuzz.refusals import is_right

# Transports of configurations by the last digit of their number; all others run on threads. Gloo
# only carries messages, so torch packs and adds.
_ON_PROCESSES: dict[int, Literal["host", "gloo"]] = {4: "gloo" if EVERY else "host", 9: "host"}
# Limit of a wait between ranks, on any transport. A configuration takes milliseconds.
WAIT_S = 20.0
REDRAWS = 200
PACKAGE = str(Path(gpudist.__file__).parent)


@dataclass(frozen=True)
class Configuration:
    """A case, the number of ranks in its world, and how they talk."""

    case: Case
    ranks: int
    transport: Literal["loopback", "host", "gloo"] = "loopback"

    def to_json(self) -> str:
        return to_json(self.case, ranks=self.ranks, transport=self.transport)

    @classmethod
    def from_json(cls, text: str) -> Configuration:
        """Deserialize a case; the number of ranks defaults to the size of the grid."""
        case, more = from_json(text)
        return cls(case, **{"ranks": prod(case.grid), **more})


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Attributes:
        how: both layers were equal, the distributed one refused, or torch's refused; ``"wrong"`` is
            everything else.
        text: type and message of the error.
        trace: traceback, if the outcome is wrong.
        at_construction: whether the constructor refused.
        is_echo: whether the error only says that another rank failed or did not arrive.
    """

    how: Literal["right", "refused", "refused by torch", "wrong"] = "right"
    text: str = ""
    trace: str = ""
    at_construction: bool = False
    is_echo: bool = False


@dataclass(frozen=True)
class Verdict:
    """Verdict on a configuration; as in `Ended`, for all ranks together."""

    how: Literal["right", "refused", "refused by torch", "wrong"]
    text: str = ""
    trace: str = ""

    @property
    def kind(self) -> str:
        """Identify failures with one cause: the first line, without the numbers."""
        return f"{self.how}: {without_numbers(self.text.partition(chr(10))[0])}"


def without_numbers(text: str) -> str:
    return re.sub(r"\[[-\d, #]*\]", "[#]", re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text))


def draw(
    rng: random.Random, number: int, layers: Sequence[str], ranks: Sequence[int]
) -> Configuration:
    """Return a configuration of one of the ``layers`` on one of these numbers of ranks."""
    layer, size = rng.choice(layers), rng.choice(ranks)
    case = by_layer()[layer].draw(rng, layer, size)
    assert prod(case.grid) <= size, f"{case} needs more than {size} ranks"
    return Configuration(case, size, _ON_PROCESSES.get(number % 10, "loopback"))


class Runner:
    """Carries out configurations, over loopback or on processes of a pool.

    Args:
        pool: gives the pool when it is first needed.
    """

    def __init__(self, pool: Callable[[], RankPool]) -> None:
        self._pool = pool

    def examine(
        self, number: int, seed: int, layers: Sequence[str], ranks: Sequence[int]
    ) -> tuple[Configuration, Verdict]:
        """The configuration of this number, drawn again until torch takes it, and its verdict."""
        rng = random.Random(f"{seed}/{number}")
        for _ in range(REDRAWS):
            configuration = draw(rng, number, layers, ranks)
            verdict = self.judge(configuration)
            if verdict.how != "refused by torch":
                return configuration, verdict
        raise RuntimeError(f"torch refused {REDRAWS} configurations in a row: {verdict.text}")

    def judge(self, configuration: Configuration) -> Verdict:
        carry_out = self._on_threads if configuration.transport == "loopback" else self._on_pool
        verdict = judge(configuration.case, carry_out(configuration))
        if verdict.how == "refused" and not is_right(verdict.text):
            return Verdict("wrong", f"refused without a reason that is known: {verdict.text}")
        return verdict

    def _on_threads(self, configuration: Configuration) -> list[Ended]:
        ended: list[Ended | None] = [None] * configuration.ranks

        def body(P_world: Partition) -> None:
            assert P_world.rank is not None
            ended[P_world.rank], error = end_of(P_world, configuration.case)
            if error is not None:
                raise error

        failure: BaseException | None = None
        try:
            run_distributed(body, configuration.ranks, timeout=WAIT_S)
        except Exception as error:
            failure = error
        stuck = Ended("wrong", "the rank has not ended", str(failure))
        return [each or stuck for each in ended]

    def _on_pool(self, configuration: Configuration) -> list[Ended]:
        try:
            return self._pool().run(
                configuration.ranks, _rank_of_pool, (configuration.case,), limit_s=2 * WAIT_S,
                transport=configuration.transport,
            )  # fmt: skip
        except RanksFailed as failed:
            ended = [Ended()] * configuration.ranks
            for outcome in failed.outcomes:
                if outcome.error is not None:
                    ended[outcome.rank] = _wrong(outcome.error, outcome.text)
            return ended


def _rank_of_pool(P_world: Partition, case: Case) -> Ended:
    ended, error = end_of(P_world, case)
    if error is not None:
        raise error
    return ended


def end_of(P_world: Partition, case: Case) -> tuple[Ended, Exception | None]:
    """Return how this rank ends, and the error to raise so that other ranks do not wait for it."""
    observed_refusal_of_torch()
    torch.manual_seed(case.seed)
    try:
        by_layer()[case.layer].check(case, P_world)
    except Exception as error:
        ended = _end_by(error, observed_refusal_of_torch())
        return ended, error if ended.how == "wrong" else None
    by_torch = observed_refusal_of_torch()
    return (Ended() if by_torch is None else Ended("refused by torch", by_torch)), None


def _end_by(error: Exception, by_torch: str | None) -> Ended:
    """How a rank that met ``error`` ended, where torch may have refused before."""
    text = f"{type(error).__name__}: {error}"
    ours = [
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(PACKAGE)
    ]
    refused = isinstance(error, (PartitionError, ShapeError))
    of_torch = isinstance(error, (RuntimeError, ValueError, NotImplementedError)) and not ours
    if by_torch is not None and (refused or text == by_torch):
        return Ended("refused by torch", text)
    if refused:
        return Ended("refused", text, at_construction="__init__" in ours)
    if of_torch:
        return Ended("refused by torch", text)
    return _wrong(error, "".join(traceback.format_exception(error)))


def _wrong(error: BaseException, trace: str) -> Ended:
    text = f"{type(error).__name__}: {error}"
    return Ended("wrong", text, trace, is_echo=isinstance(error, TransportError))


def judge(case: Case, ended: list[Ended]) -> Verdict:
    """Return the verdict on how the ranks of a world ended.

    A constructor must refuse on every rank; a call, which only the workers of the partitions need
    hear of, on as many as the grid has; all with the same text.
    """
    failed = [each for each in ended if each.how in ("wrong", "refused by torch")]
    refused = {rank: each for rank, each in enumerate(ended) if each.how == "refused"}
    if refused and not _agree(case, list(refused.values()), len(ended)):
        texts = sorted({each.text for each in refused.values()})
        others = sorted({each.text or each.how for each in ended if each.how != "refused"})
        text = f"refused on ranks {sorted(refused)} of {len(ended)} only, or not alike: {texts}"
        return Verdict("wrong", text, f"other ranks: {others}")
    if any(each.how == "wrong" for each in failed):
        cause = min(failed, key=lambda each: (each.is_echo, each.how != "wrong"))
        return Verdict("wrong", cause.text, cause.trace)
    for how in ("refused by torch", "refused"):
        for each in ended:
            if each.how == how:
                return Verdict(each.how, each.text)
    return Verdict("right")


def _agree(case: Case, refused: list[Ended], size: int) -> bool:
    needed = size if any(each.at_construction for each in refused) else prod(case.grid)
    return len({each.text for each in refused}) == 1 and len(refused) >= needed
