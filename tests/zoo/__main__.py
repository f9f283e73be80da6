"""Judge the networks of the zoo: ``make zoo``.

Each network has its own process. Verdicts are kept in build/zoo; a network that has a verdict for
the same code is not judged again. Exits with 1 if any is wrong or more than four are not right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from fnmatch import fnmatch
from typing import get_args

import torch

from tests.progress import shown
from tests.zoo.judge import GRIDS, Mode, Verdict, judge
from tests.zoo.networks import DOZEN, all_networks, missing_packages
from tests.zoo.results import ROOT, code_version, described, keep, kept, passes, table

# Two workers' threads and an optimizer's state fit beside one another.
_JOBS = 2


def main() -> int:
    options = _options()
    if options.one:
        for grid in options.grids:
            verdict = judge(options.one, grid, options.mode, options.limit / 2)
            print(json.dumps(asdict(verdict)), flush=True)
        return 0
    if missing := missing_packages():
        raise SystemExit(f"not installed: {', '.join(missing)}; `make zoo` installs them")
    names = DOZEN if options.dozen else [network.name for network in all_networks()]
    index, shards = options.shard
    names = [name for name in names if _fits(name, options.only)][index - 1 :: shards]
    if not names:
        raise SystemExit(f"no network fits --only {options.only} --shard {index}/{shards}")
    version = code_version()
    known = {} if options.again else kept(options.mode, version)
    left = {name: [g for g in options.grids if (name, g) not in known] for name in names}
    left = {name: grids for name, grids in left.items() if grids}
    with shown(len(left)) as advance, ThreadPoolExecutor(options.jobs) as pool:
        judged = [
            pool.submit(_judge_apart, name, grids, options.mode, options.limit)
            for name, grids in left.items()
        ]
        for each in as_completed(judged):
            for verdict in each.result():
                keep(verdict, version)
                known[verdict.name, verdict.grid] = verdict
                print(f"{verdict.name} on {verdict.grid}: {described(verdict)}", flush=True)
            advance()
    verdicts = [known[name, grid] for name in names for grid in options.grids]
    print(table(verdicts))
    return 0 if passes(verdicts) else 1


def _judge_apart(name: str, grids: list[str], mode: Mode, limit_s: float) -> Iterator[Verdict]:
    """Return the verdicts of another process; ``failed`` for those it did not reach."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.zoo", "--one", name, "--mode", mode]
    command += ["--grids", ",".join(grids), "--limit", str(limit_s)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s
        )  # fmt: skip
        out, why = (
            ended.stdout,
            f"the process ended with {ended.returncode}: {ended.stderr[-2000:]}",
        )
    except subprocess.TimeoutExpired as stopped:
        out = (stopped.stdout or b"").decode()
        why = f"not done after {limit_s:g} s"
    # Some packages print when they are imported or called.
    found = [Verdict(**json.loads(line)) for line in out.splitlines() if line.startswith('{"name"')]
    come_to = {verdict.grid for verdict in found}
    return iter([*found, *(Verdict(name, g, mode, text=why) for g in grids if g not in come_to)])


def _fits(name: str, pattern: str) -> bool:
    return any(fnmatch(name, one) or one in name for one in pattern.split(","))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.zoo")
    parser.add_argument(
        "--only", default="*", help="parts of the names, or patterns of them, with commas between"
    )
    parser.add_argument("--dozen", action="store_true", help="only the twelve of the suite")
    parser.add_argument("--shard", type=_shard, default=(1, 1), help="I/N: every Nth, from the Ith")
    parser.add_argument("--grids", type=_grids, default=list(GRIDS), help=f"of {','.join(GRIDS)}")
    parser.add_argument("--again", action="store_true", help="judge what has a verdict, too")
    parser.add_argument("--jobs", type=int, default=_JOBS, help="networks at a time")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds for a network; half of it for a grid"
    )
    parser.add_argument(
        "--mode", choices=get_args(Mode), default="distribute",
        help="'searched' follows plans of layouts; 'sequential' and 'tampered' judge the judge: "
        "all is to be right, and all wrong",
    )  # fmt: skip
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _shard(text: str) -> tuple[int, int]:
    index, _, shards = text.partition("/")
    if not (index.isdigit() and shards.isdigit() and 1 <= int(index) <= int(shards)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N")
    return int(index), int(shards)


def _grids(text: str) -> list[str]:
    grids = text.split(",")
    if not set(grids) <= GRIDS.keys():
        raise argparse.ArgumentTypeError(f"{text!r}: the grids are {', '.join(GRIDS)}")
    return grids


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
