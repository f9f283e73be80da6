"""Random operators for a given time: plans, public functions and layers, all checked."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import torch

from gpudist.ops import operator
from gpudist.testing.rank_pool import RankPool
from gpudist.world.partition import Partition
from tests.faults import random_calls
from tests.faults.operators import drawn
from tests.faults.soak.samples import Sample, take
from tests.fuzz.case import Case, to_json
from tests.fuzz.families import by_layer
from tests.fuzz.run import Configuration, Runner
from tests.native.stress import carry_out_random

# Rounds of a chunk, after which ranks agree on whether to go on.
PLANS, FUNCTIONS, LAYERS = 6, 6, 1
# Plans of a round, all in flight at once.
TOGETHER = (2, 6, 16, 36)
# So few functions are remembered here that most of a run has forgotten some.
REMEMBERED = 32


def run(
    P_world: Partition,
    operators: int,
    minutes: float,
    seed: int,
    cases: Sequence[Case],
    shows: bool = True,
) -> tuple[list[Sample], Counter[str]]:
    """Carry out random operators until both limits are reached. Collective.

    Args:
        operators, minutes: least number of operators and least duration.
        seed: seed of all draws.
        cases: layers, which are made, checked and dropped in turn.
        shows: whether the first rank's terminal shows progress.

    Returns:
        This rank's samples, one per hundredth of the run, and the number of operators of each kind.

    Raises:
        AssertionError: a result differs from the oracle's.
    """
    warnings.simplefilter("ignore")
    operator._REMEMBERED_OPERATORS = REMEMBERED
    met: Counter[str] = Counter()
    samples = [take(P_world, 0)]
    start_s = time.monotonic()
    done, number = 0.0, 0
    while done < 1:
        met += _chunk(P_world, seed, number, cases)
        number += 1
        elapsed_s = time.monotonic() - start_s
        mine = min(met.total() / operators, elapsed_s / (60 * minutes) if minutes else 1.0)
        before, done = done, P_world.broadcast_data([int(1e6 * mine)])[0] / 1e6
        if int(100 * done) > int(100 * before):
            samples.append(take(P_world, met.total()))
            if shows and P_world.rank == 0:
                _show(done, samples[-1], elapsed_s)
    return samples, met


def _chunk(P_world: Partition, seed: int, number: int, cases: Sequence[Case]) -> Counter[str]:
    met: Counter[str] = Counter()
    plans = carry_out_random(P_world, seed, number * PLANS, PLANS, TOGETHER)
    plans.pop("groups")
    met["plans"] += plans.total()
    for each in range(FUNCTIONS):
        rng = random.Random(f"{seed}/{number}/{each}")
        call = drawn(rng, P_world)
        random_calls.check(P_world, rng, call)
        met[f"functions: {call.name.partition(' ')[0]}"] += 1
    for each in range(LAYERS if cases else 0):
        case = cases[(number * LAYERS + each) % len(cases)]
        torch.manual_seed(case.seed)
        try:
            by_layer()[case.layer].check(case, P_world)
        except BaseException as error:
            raise AssertionError(f"{to_json(case)}: {type(error).__name__}: {error}") from error
        met["layers"] += 1
    return met


def accepted_layers(seed: int, count: int, ranks: int) -> list[Case]:
    """Random layers that torch and gpudist take, as threads of this process have found.

    A layer that refuses a call ends its world, and a long run has one.
    """
    runner = Runner(_no_pool)
    found: list[Case] = []
    number = 0
    while len(found) < count:
        rng = random.Random(f"{seed}/layer {number}")
        number += 1
        layer = rng.choice(list(by_layer()))
        case = by_layer()[layer].draw(rng, layer, ranks)
        if runner.judge(Configuration(case, ranks)).how == "right":
            found.append(case)
    return found


def _no_pool() -> RankPool:
    raise AssertionError("layers are tried over loopback")


def _show(done: float, sample: Sample, elapsed_s: float) -> None:
    width = int(40 * done)
    end = "\n" if done >= 1 or not sys.stderr.isatty() else "\r"
    sys.stderr.write(
        f"{'#' * width}{'-' * (40 - width)} {sample.operators} operators, {elapsed_s:.0f} s, "
        f"{sample.resident_bytes / 2**20:.1f} MiB on rank 0{end}"
    )
    sys.stderr.flush()
