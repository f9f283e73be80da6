"""The tests of ``tests/gpu`` on CPU tensors, over the doubles with the compiled kernels in them.

python -m tests.ptx.rehearsal [--architecture 90] [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.ptx.build import ARCHITECTURES, library

TESTS = ["tests/gpu", "-q", "-rs"]


def rehearse(architecture: int, arguments: list[str]) -> str:
    """Run pytest; return what was wrong, empty if nothing was."""
    _, environment = library(architecture)
    with tempfile.TemporaryDirectory() as folder:
        faults, counts = Path(folder) / "faults", Path(folder) / "counts"
        environment |= {"GPUDIST_PTX_FAULTS": str(faults), "GPUDIST_PTX_COUNTS": str(counts)}
        command = [sys.executable, "-m", "pytest", *(arguments or TESTS)]
        done = subprocess.run(command, env=os.environ | environment)
        found = faults.read_text() if faults.exists() else ""
        launched = counts.read_text().splitlines() if counts.exists() else []
    executed = sum(int(times) for line in launched for times in line.split()[1:])
    print(f"sm_{architecture}: {executed / 1e6:.0f} million instructions of kernels executed")
    if found:
        return f"accesses of memory that are wrong:\n{found}"
    if executed == 0:
        return "no kernel was launched"
    return f"pytest ended with {done.returncode}" if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES, help="both without it")
    parsed, arguments = parser.parse_known_args()
    for architecture in [parsed.architecture] if parsed.architecture else ARCHITECTURES:
        wrong = rehearse(architecture, arguments)
        if wrong:
            print(f"sm_{architecture}: {wrong}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
