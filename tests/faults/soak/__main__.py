"""Long runs of random operators, worlds and layers; growth or a wrong result fails the run.

``python -m tests.faults.soak --operators 100000 --minutes 20``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from gpudist.testing.rank_pool import RankPool
from tests.faults.figures import Figure, growth, spread, worst
from tests.faults.soak import layers, mixture, worlds
from tests.faults.soak.samples import BYTES, COUNTS, Sample, series

RANKS = 4
# Limit of a wait between ranks, also on a busy machine.
WAIT_S = 120.0
LAYERS = 400
# Caches fill up first: of plans bound lately, of what the C library keeps, of operators.
WARM_UP = 0.5
GROWTH_MIB = 8.0
# What is remembered of plans has a number, and each its own size.
GROWTH_PERCENT = 2.0


def operator_figures(transport: str, options: argparse.Namespace) -> list[Figure]:
    """Random operators on processes, checked one by one."""
    cases = mixture.accepted_layers(options.seed, LAYERS, RANKS)
    with RankPool(RANKS, WAIT_S) as pool:
        answers = pool.run(
            RANKS,
            mixture.run,
            (options.operators, options.minutes, options.seed, cases),
            limit_s=3600 + 600 * options.minutes,
            transport=transport,
        )
    met = answers[0][1]
    found = [Figure(f"{transport}: {name}", count, "") for name, count in sorted(met.items())]
    found.append(Figure(f"{transport}: operators", met.total(), "operators"))
    return found + leak_figures(transport, [answer[0] for answer in answers])


def leak_figures(subject: str, by_rank: Sequence[Sequence[Sample]]) -> list[Figure]:
    """Return how much the ranks' holdings have grown since the warm-up."""
    warm = [list(samples[int(WARM_UP * len(samples)) :]) for samples in by_rank]
    resident = series(warm, "resident_bytes")
    first, last = warm[0][0], warm[0][-1]
    mib = {name: worst(growth, series(warm, name)) / 2**20 for name in BYTES}
    blocks = series(warm, "python_blocks")
    percent = 100 * worst(growth, blocks) / max(map(max, blocks))
    count = last.operators - first.operators
    found = [
        Figure(f"{subject}: samples of each rank", len(by_rank[0]), "samples"),
        Figure(f"{subject}: time", round(last.seconds - by_rank[0][0].seconds), "s"),
        Figure(f"{subject}: operators after the warm-up", count, "operators"),
        Figure(f"{subject}: resident memory, largest", round(max(map(max, resident)) / 2**20, 1),
               "MiB"),
        Figure(f"{subject}: growth of resident memory", round(mib["resident_bytes"], 2), "MiB",
               GROWTH_MIB),
        Figure(f"{subject}: growth of memory in use by C and C++", round(mib["allocated_bytes"], 2),
               "MiB", GROWTH_MIB),
        Figure(f"{subject}: growth of blocks in use by Python", round(percent, 2), "%",
               GROWTH_PERCENT),
    ]  # fmt: skip
    for name in COUNTS:
        change = worst(spread, series(warm, name))
        found.append(Figure(f"{subject}: change of {name}", change, name, 0))
    return found


def world_figures(transport: str, count: int) -> list[Figure]:
    """Worlds made and closed."""
    samples = worlds.run(transport, count)
    made = Figure(f"worlds over {transport}: made and closed", samples[-1].operators, "worlds")
    return [made, *leak_figures(f"worlds over {transport}", [samples])]


def layer_figures(options: argparse.Namespace) -> list[Figure]:
    """Layers made and dropped, by ranks that are processes."""
    with RankPool(RANKS, WAIT_S) as pool:
        answers = pool.run(
            RANKS, layers.run, (options.networks, options.seed), limit_s=7200, transport="host"
        )
    return [
        Figure("layers: networks made and dropped", options.networks, "networks"),
        Figure("layers: outlived their last use", sum(alive for _, alive, _ in answers), "layers",
               0),
        Figure("layers: steps kept, most", max(most for _, _, most in answers), "steps", 4096),
        *leak_figures("layers", [samples for samples, _, _ in answers]),
    ]  # fmt: skip


SUBJECTS: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
    "operators": lambda options: operator_figures("host", options),
    "worlds": lambda options: world_figures("host", options.worlds),
    "loopback": lambda options: world_figures("loopback", options.worlds),
    "layers": layer_figures,
}


def main() -> int:
    options = _options()
    over = False
    for name in options.subject or SUBJECTS:
        print(f"{name}:", flush=True)
        figures = SUBJECTS[name](options)
        for figure in figures:
            print(f"  {figure}", flush=True)
        over |= any(figure.is_over for figure in figures)
    return 1 if over else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--operators", type=int, default=100_000, help="at least so many")
    parser.add_argument("--minutes", type=float, default=20.0, help="at least so long")
    parser.add_argument("--worlds", type=int, default=10_000, help="made and closed")
    parser.add_argument("--networks", type=int, default=4_000, help="made and dropped")
    parser.add_argument("--seed", type=int, default=1, help="the same ones for the same seed")
    parser.add_argument("--subject", choices=list(SUBJECTS), action="append", help="of this alone")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
