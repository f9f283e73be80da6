"""Compile the bindings against the stable ABI, without making code: ``make stable-abi``.

One wheel serves Python 3.12 and all later versions, so its module may call only what the stable ABI
of 3.12 has. Older Pythons allow more, and a build for one of them does not notice. Needs nanobind
and the headers of a Python 3.12, which need not run anything. Without the headers the check fails
where ``CI`` is set, and says what it leaves out elsewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from release.interpreters import NoPython, interpreter

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
# Of CMake's nanobind_add_module(... STABLE_ABI).
LIMIT = "-DPy_LIMITED_API=0x030C0000"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make stable-abi", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="sources; all bindings if empty")
    files = parser.parse_args().files or bindings()
    try:
        headers = headers_of(PYTHON)
    except NoPython as missing:
        print(f"not checked against the stable ABI: {', '.join(f.name for f in files)}: {missing}")
        return 1 if os.environ.get("CI", "") not in ("", "false", "0") else 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = list(pool.map(lambda file: error_of(file, headers), files))
    for file, error in zip(files, errors, strict=True):
        print(f"{file.name}: {error or f'compiles for the stable ABI of Python {PYTHON}'}")
    return 1 if any(errors) else 0


def bindings() -> list[Path]:
    """Return the sources of the Python module."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    (module,) = re.findall(r"nanobind_add_module\((.+?)\)", text, re.DOTALL)
    return [ROOT / name for name in re.findall(r"\S+\.cpp", module)]


def headers_of(python: str) -> Path:
    """Return the folder with ``Python.h`` of this version.

    Raises:
        NoPython: this machine has no such Python, or only without headers.
    """
    program = "import sysconfig; print(sysconfig.get_path('include'))"
    own = interpreter(python)
    shown = subprocess.run([own, "-c", program], capture_output=True, text=True, check=True)
    folder = Path(shown.stdout.strip())
    if not (folder / "Python.h").is_file():
        raise NoPython(f"{own} has no headers in {folder} (Debian: apt-get install python3-dev)")
    return folder


def error_of(file: Path, headers: Path) -> str:
    """Return the compiler's errors in ``file``, or an empty text."""
    ended = subprocess.run(command(file, headers), capture_output=True, text=True, check=False)
    return ended.stderr.strip() if ended.returncode else ""


def command(file: Path, headers: Path) -> Sequence[str | Path]:
    import nanobind

    compiler = shlex.split(os.environ.get("CXX", "c++"))
    folders = ["-I", ROOT / "csrc", "-isystem", headers, "-isystem", nanobind.include_dir()]
    options = ["-std=c++17", "-fsyntax-only", "-fvisibility=hidden", LIMIT]
    return [*compiler, *options, *folders, file]


if __name__ == "__main__":
    sys.exit(main())
