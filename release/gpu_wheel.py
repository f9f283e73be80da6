"""Build a wheel for the one kind of GPU that is to be tried: ``make gpu-wheel``.

A machine that is lent for minutes should not spend them compiling. The wheel is for the stable ABI
of Python 3.12 and later, with machine code for one architecture, so that it builds in a minute.
``make gpu-first WHEEL=FILE`` puts its native core into the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from release.interpreters import new_environment

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "gpu-wheel"
PYTHON = "3.12"
# sm_90: H100, H200 and GH200.
ARCHITECTURES = "90-real"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make gpu-wheel", description=__doc__)
    parser.add_argument(
        "--architectures", default=ARCHITECTURES, help="as CMAKE_CUDA_ARCHITECTURES has them"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the wheel")
    arguments = parser.parse_args()
    wheel = build(arguments.architectures, arguments.out)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB, for {arguments.architectures}")


def build(architectures: str, out: Path) -> Path:
    """Return the wheel of this tree, the only file in ``out``."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    python = new_environment(PYTHON, ROOT / "build" / "gpu-wheel-venv")
    command = [python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", out, ROOT]
    variables = {
        "GPUDIST_NATIVE": "on",
        "GPUDIST_CUDA": "on",
        "GPUDIST_CUDA_ARCHITECTURES": architectures,
    }
    subprocess.run(command, env={**os.environ, **variables}, check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


if __name__ == "__main__":
    main()
