"""Mutation testing: which small errors in the code does no test notice?

``python -m tests.mutants --room geometry --count 300 --seed 1``; without ``--count``, all of them.
"""

from __future__ import annotations

import argparse
import ast
import math
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch

from tests.mutants.mutate import Mutant, mutants
from tests.mutants.run import SURVIVED, outcome

ROOT = Path(__file__).resolve().parents[2]
# Mutants that change nothing a caller can see, such as the size of a cache: so many of all survive.
EQUIVALENT = {"geometry": 31, "exchange": 9}
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
# Loaded before the forks, which then start at once.
PRELOADED = (hypothesis, numpy, pytest, torch)
# Tests that measure time fail for other reasons than a mutant.
NOT_TIMED = ["-k", "not takes_time"]
EXCHANGE = [
    "tests/exchange/test_movement.py", "tests/exchange/test_exchange.py",
    "tests/exchange/test_repetition.py", "tests/exchange/test_operators.py",
    "tests/ops/test_halo_exchange.py",
    "tests/ops/test_repartition.py", "tests/ops/test_broadcast.py", "tests/ops/test_sum_reduce.py",
    "tests/ops/test_all_gather.py", "tests/ops/test_send_recv.py", "tests/ops/test_errors.py",
    "tests/test_determinism.py::test_additions_are_in_ascending_rank_order",
    "tests/profiling/test_stats.py",
]  # fmt: skip


# Geometry whose numbers only a comparison of a layer with torch's tests.
LAYERS = {
    "halo": [
        "affine/test_conv",
        "affine/test_conv_with_ghosts",
        "windowed/test_halo_region",
    ],
    "parts": ["pool/test_pool_adaptive"],
    "repartition": ["attention/test_attention", "norm/test_norm_layer"],
    "ring": ["attention/test_attention"],
    "windows": [
        "affine/test_conv",
        "affine/test_conv_padding",
        "affine/test_conv_transpose",
        "pool/test_pool",
        "pool/test_pool_ceil",
        "pool/test_pool_indices",
        "windowed/test_pad",
        "windowed/test_upsample",
    ],
}
# Families of generated layers that depend on this geometry, by their names in tests/fuzz.
GENERATED = {"halo": "conv or halo_region", "windows": "conv or pad or halo_region"}


def tests_of(path: Path) -> list[list[str]]:
    """Return the tests to run, one after another, until one fails.

    First come the tests that name the module or something in it, its namesake before all. For code
    that moves data, threads come first; then gloo, which only carries messages; then NCCL, which
    keeps layouts. For some of geometry, layers beside torch's come last.
    """
    if path.parent.name == "exchange":
        chosen = ("loopback", "gloo and not twelve_ranks")
        keeps_layouts = ["-k", "nccl", "tests/transport/test_nccl_layouts.py"]
        return [*(["-k", which, *EXCHANGE] for which in chosen), keeps_layouts]
    tree = ast.parse(path.read_text())
    names = {path.stem} | {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
    pattern = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    files = sorted((ROOT / "tests" / "geometry").glob("test_*.py"))
    files = [file for file in files if pattern.search(file.read_text())] or files
    files.sort(key=lambda file: file.stem != f"test_{path.stem}")
    layers = [f"tests/nn/{name}.py" for name in LAYERS.get(path.stem, ())]
    generated = f"test_random_configurations and ({GENERATED.get(path.stem)})"
    return [
        [*(str(file.relative_to(ROOT)) for file in files), *NOT_TIMED],
        *([["-k", "loopback", *layers]] if layers else []),
        *([["-k", generated, "tests/fuzz/test_fuzz.py"]] if path.stem in GENERATED else []),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--room", choices=list(EQUIVALENT), default="geometry")
    parser.add_argument("--file", help="one module of the room", default="*")
    parser.add_argument("--count", type=int, help="a sample of so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--most",
        type=int,
        help="fail if more survive; the room's equivalent mutants, or their share",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a mutant")
    parser.add_argument("--examples", type=int, default=40, help="of each property")
    options = parser.parse_args()
    paths = sorted((ROOT / "gpudist" / options.room).glob(f"{options.file}.py"))
    # The interface to torch is covered by tests of compiled and traced networks.
    paths = [path for path in paths if path.stem not in ("autograd", "torch_library", "tracing")]
    chosen = [(path, mutant) for path in paths for mutant in mutants(path.read_text())]
    total = len(chosen)
    if options.count is not None and options.count < total:
        chosen = random.Random(options.seed).sample(chosen, options.count)

    def try_source(path: Path, source: str) -> str:
        module = f"gpudist.{options.room}.{path.stem}"
        result = SURVIVED
        for tests in tests_of(path):
            result = outcome(module, str(path), source, tests, options.limit, options.examples)
            if result != SURVIVED:
                break
        return result

    def try_one(item: tuple[Path, Mutant]) -> str:
        path, mutant = item
        result = try_source(path, mutant.source)
        if result == SURVIVED:
            where = f"{path.relative_to(ROOT)}:{mutant.line}"
            print(f"survived: {where}: {mutant.change}", flush=True)
        return result

    if chosen and try_source(chosen[0][0], chosen[0][0].read_text()) != SURVIVED:
        raise SystemExit("the tests fail without a mutant")
    with ThreadPoolExecutor(options.jobs) as pool:
        results = Counter(pool.map(try_one, chosen))
    print(f"{options.room}: {total} mutants, {len(chosen)} tried (seed {options.seed}):")
    print(", ".join(f"{count} {result}" for result, count in sorted(results.items())))
    most = options.most
    if most is None:
        all_may = EQUIVALENT[options.room] if options.file == "*" else 0
        most = math.ceil(all_may * len(chosen) / max(1, total))
    return 1 if results[SURVIVED] > most else 0


if __name__ == "__main__":
    raise SystemExit(main())
