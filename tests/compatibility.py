"""Run the suite on other versions of torch: ``make compatibility``.

Each torch comes from PyPI, with its CUDA libraries, and has its own virtual environment, kept under
build/compatibility. Gpudist is this checkout, with the native core built in place.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from gpudist.world.environment import TESTED_TORCH, is_tested, numbers

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "compatibility"


def oldest_allowed(pyproject: str) -> str:
    """Return the minimum version of torch in ``pyproject.toml``."""
    (found,) = re.findall(r'"torch>=([\d.]+)"', pyproject)
    return found


def newest_on_pypi() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.match(r"torch \(([\d.]+)\)", told)
    if found is None:
        raise SystemExit(f"`{' '.join(command[1:])}` names no version:\n{told}")
    if numbers(found[1]) < numbers(TESTED_TORCH[1]):
        raise SystemExit(
            f"pip finds no torch after {found[1]}, but gpudist is tested with {TESTED_TORCH[1]}: "
            "is PyPI reachable? `pip index versions torch` tells"
        )
    return found[1]


def install(version: str) -> Path:
    """Return the Python of an environment with this torch and the packages that the tests need."""
    folder = FOLDER / version
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.exists():
        return python
    constraints = FOLDER / f"{version}.txt"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    constraints.write_text(f"torch=={version}\n")
    subprocess.run([*pip, f"torch=={version}"], check=True)
    # No Python but the one that built the native core is here, so it is not built again.
    subprocess.run(
        [*pip, "-c", str(constraints), "-e", f"{ROOT}[test,examples]"],
        check=True,
        env={**os.environ, "GPUDIST_NATIVE": "off"},
    )
    done.touch()
    return python


def run_tests(python: Path, version: str, arguments: list[str]) -> tuple[bool, str]:
    """Return whether all passed, and pytest's own last line."""
    log = FOLDER / f"{version}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        ended = subprocess.run(
            [python, "-m", "pytest", "-q", "-rf", *arguments],
            cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    return ended.returncode == 0, log.read_text().rstrip().rpartition("\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.compatibility")
    parser.add_argument(
        "--torch", nargs="*", default=[],
        help="versions; the oldest that is allowed and the newest on PyPI, if there are none",
    )  # fmt: skip
    asked, arguments = parser.parse_known_args()
    pyproject = (ROOT / "pyproject.toml").read_text()
    versions = asked.torch or [oldest_allowed(pyproject), newest_on_pypi()]
    results = {version: run_tests(install(version), version, arguments) for version in versions}
    oldest, newest = TESTED_TORCH
    for version, (passes, line) in results.items():
        print(f"torch {version} {'passes' if passes else 'FAILS'}: {line} ({FOLDER / version}.log)")
        if not is_tested(version):
            print(f"    gpudist/world/environment.py states {oldest} to {newest}")
    return 0 if all(passes for passes, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
