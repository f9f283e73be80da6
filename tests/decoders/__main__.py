"""Decode latents of drawn sizes, in blocks and alone: ``python -m tests.decoders --count 200``.

Each draw that differs by more than roundings is printed. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tests.decoders.draws import drawn, errors
from tests.progress import shown


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    worst, wrong = 0.0, 0
    with shown(options.count) as advance:
        for number in range(options.first, options.first + options.count):
            draw = drawn(options.seed, number)
            found = errors(draw)
            worst = max(worst, found.distributed)
            if not found.is_rounding:
                wrong += 1
                print(f"{number}: {draw}: {found}", flush=True)
            advance()
    print(f"{options.count} draws: {wrong} wrong; largest error {worst:.1e} of the largest cell")
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.decoders", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many draws")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=1, help="the same ones for the same seed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
