"""Random launches of the compiled kernels against plain loops, and the lines they execute.

python -m tests.ptx.launches [--architectures 80 90] [--kernels random_cells]
        [--count 50000] [--seed 1]
"""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.ptx.assembly import Instruction, read
from tests.ptx.build import HERE, KERNELS, ROOT, UNITS, program, ptx_of

LEAST_COVERED = 0.98
# What launches the kernels of each file.
SOURCES = {
    "combine_kernels": [HERE / "random_launch.cpp", ROOT / "tests" / "csrc" / "combine_cases.cpp"],
    "random_cells": [HERE / "random_draw.cpp"],
    "norm_kernels": [
        HERE / f"{name}.cpp" for name in ("random_norm", "norm_case", "norm_loops", "far_norm")
    ],
}
# Numbers of launches of `make ptx`. A normalization is six of them, of more cells.
COUNT, NORMALIZATIONS = 50_000, 5_000


@dataclass(frozen=True)
class Outcome:
    """Results of launches.

    Attributes:
        wrong: first error; empty if there was none.
        missed: for each kernel, the instructions that were never executed.
        instructions: number of instructions of each kernel.
        executed: instructions executed by all threads of all launches.
    """

    wrong: str
    missed: dict[str, list[Instruction]]
    instructions: dict[str, int]
    executed: int

    @property
    def covered(self) -> float:
        missed = sum(map(len, self.missed.values()))
        return 1 - missed / sum(self.instructions.values())


def launcher(architecture: int, name: str = KERNELS[0]) -> tuple[Path, dict[str, str]]:
    shared = [HERE / "launches.cpp", HERE / "random_case.cpp"]
    return program([*shared, *SOURCES[name]], architecture, name)


def launch(architecture: int, count: int, seed: int, name: str = KERNELS[0]) -> Outcome:
    path, environment = launcher(architecture, name)
    kernels = {kernel.name: kernel.instructions for kernel in read(ptx_of(architecture, name))}
    command = [path, str(count), str(seed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    *counts, last = done.stdout.splitlines() or [""]
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    missed: dict[str, list[Instruction]] = {}
    executed = 0
    for line in counts:
        name, *times = line.split()
        executed += sum(map(int, times))
        pairs = zip(kernels[name], times, strict=True)
        missed[name] = [one for one, often in pairs if often == "0"]
    sizes = {name: len(instructions) for name, instructions in kernels.items()}
    return Outcome("" if last == "passed" else last, missed, sizes, executed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--kernels", nargs="+", default=list(UNITS), choices=UNITS)
    parser.add_argument("--count", type=int, help="default: 50,000, but 5,000 normalizations")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = False
    for architecture, file in product(arguments.architectures, arguments.kernels):
        count = arguments.count or (NORMALIZATIONS if file == "norm_kernels" else COUNT)
        found = launch(architecture, count, arguments.seed, file)
        for name, missed in found.missed.items():
            size = found.instructions[name]
            print(f"sm_{architecture} {name}: {len(missed)} of {size} lines missed")
            for one in missed:
                print(f"    {one.line}: {one}")
        print(
            f"sm_{architecture}, {file}: {count} launches, "
            f"{found.executed / 1e6:.0f} million instructions, {100 * found.covered:.2f} % of "
            f"the PTX: {found.wrong or 'passed'}"
        )
        failed |= bool(found.wrong) or found.covered < LEAST_COVERED
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
