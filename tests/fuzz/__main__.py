"""Random configurations of every layer, on 2 to 6 ranks, against torch's layer.

``python -m tests.fuzz --count 2000 --seed 1``

Each failure is printed with its seed and in the smallest form found: a line of JSON that ``--case``
runs again.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gpudist.testing.rank_pool import RankPool
from tests.fuzz.families import by_layer
from tests.fuzz.run import WAIT_S, Configuration, Runner, Verdict, without_numbers
from tests.fuzz.shrink import shrink


def main() -> int:
    options = _options()
    # The inputs of inactive ranks make torch warn of tensors without cells.
    warnings.simplefilter("ignore")
    made: list[RankPool] = []

    @functools.cache
    def pool() -> RankPool:
        made.append(RankPool(max(options.ranks), WAIT_S))
        return made[0]

    try:
        if options.case is not None:
            return _replay(Runner(pool), options.case)
        return _fuzz(Runner(pool), options)
    finally:
        for each in made:
            each.close()


def _fuzz(runner: Runner, options: argparse.Namespace) -> int:
    layers = [options.layer] if options.layer else list(by_layer())
    refusals: Counter[str] = Counter()
    examples: dict[str, str] = {}
    wrong = 0
    for number in _with_progress(range(options.count)):
        configuration, verdict = runner.examine(number, options.seed, layers, options.ranks)
        if verdict.how == "refused":
            text = without_numbers(verdict.text)
            refusals[text] += 1
            examples.setdefault(text, verdict.text)
        elif verdict.how == "wrong":
            wrong += 1
            _report(runner, options.seed, number, configuration, verdict)
    if refusals:
        print("refused:")
    for text, count in refusals.most_common():
        print(f"{count:7d} {examples[text]}")
    print(f"{options.count} configurations, {wrong} wrong, {refusals.total()} refused")
    return 1 if wrong else 0


def _report(
    runner: Runner, seed: int, number: int, configuration: Configuration, verdict: Verdict
) -> None:
    small = shrunk(runner, configuration, verdict)
    print(f"wrong: seed {seed}, configuration {number}: {verdict.text}")
    print(f"  drawn:  {configuration.to_json()}")
    print(f"  shrunk: {small.to_json()}", flush=True)


def shrunk(runner: Runner, configuration: Configuration, verdict: Verdict) -> Configuration:
    """The smallest configuration found that fails in the same way, on threads if it does there."""

    def fails(configuration: Configuration) -> bool:
        return runner.judge(configuration).kind == verdict.kind

    on_threads = replace(configuration, transport="loopback")
    start = on_threads if fails(on_threads) else configuration
    return replace(start, case=shrink(start.case, lambda case: fails(replace(start, case=case))))


def _replay(runner: Runner, configuration: Configuration) -> int:
    verdict = runner.judge(configuration)
    print(f"{configuration.to_json()}\n{verdict.how}\n{verdict.text}\n{verdict.trace}".rstrip())
    return 1 if verdict.how == "wrong" else 0


def _with_progress(numbers: range) -> Iterator[int]:
    """The numbers; a bar on a terminal, if there is rich."""
    try:
        from rich.progress import track
    except ImportError:
        yield from numbers
        return
    shown: Iterable[int] = numbers
    if sys.stderr.isatty():
        from rich.console import Console

        shown = track(numbers, "configurations", console=Console(stderr=True), transient=True)
    yield from shown


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many configurations")
    parser.add_argument("--seed", type=int, default=1, help="the same ones for the same seed")
    parser.add_argument("--ranks", type=_numbers, default=range(2, 7), help="as 4, or 2..6")
    parser.add_argument("--layer", choices=list(by_layer()), metavar="NAME", help="of this alone")
    parser.add_argument("--case", type=Configuration.from_json, help="a line that was printed")
    return parser.parse_args()


def _numbers(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    sys.exit(main())
