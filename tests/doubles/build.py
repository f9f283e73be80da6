"""The shared library of the doubles, compiled on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "doubles"
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"]
LINKING = [
    "-shared",
    "-pthread",
    "-Wl,-Bsymbolic-functions",
    "-Wl,--no-undefined",
    "-Wl,-soname,libnccl_double.so",
]


class NoCompiler(RuntimeError):
    """No C++ compiler was found; tests that need the doubles skip."""


@lru_cache(maxsize=1)
def library() -> Path:
    """Return the path of the compiled library; one compilation for each state of the sources.

    Raises:
        NoCompiler: neither ``c++`` nor ``g++`` exists, and the library is not in the cache.
        RuntimeError: the sources do not compile.
    """
    target = CACHE / fingerprint() / "libnccl_double.so"
    if not target.exists():
        compile_to(target)
    return target


def sources() -> list[Path]:
    return sorted(HERE.glob("*.cpp"))


def fingerprint() -> str:
    """Return a digest of everything the library is built from."""
    digest = hashlib.blake2b(" ".join(FLAGS + LINKING).encode(), digest_size=8)
    headers = sorted(HERE.glob("*.h")) + sorted((ROOT / "csrc").rglob("*.h"))
    for path in sources() + headers:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def compile_to(target: Path) -> None:
    """Compile in a private folder, then rename, so that processes may compile concurrently."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NoCompiler("the doubles of CUDA and NCCL need a C++ compiler: no c++ or g++ in PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        units = units_in(Path(folder))
        objects = [str(unit.with_suffix(".o")) for unit in units]
        flags = [*FLAGS, "-I", str(ROOT / "csrc"), "-I", str(HERE)]
        run_all(
            [
                [compiler, *flags, "-c", str(unit), "-o", made]
                for unit, made in zip(units, objects, strict=True)
            ]
        )
        linked = f"{folder}/{target.name}"
        run_all([[compiler, *LINKING, *objects, "-o", linked]])
        os.replace(linked, target)


def units_in(folder: Path) -> list[Path]:
    """Write a unit for each core, of several sources: most of the time goes into headers."""
    cores = os.cpu_count() or 1
    units = []
    for number in range(min(cores, len(sources()))):
        unit = folder / f"unit_{number}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in sources()[number::cores]))
        units.append(unit)
    return units


def run_all(commands: list[list[str]]) -> None:
    """Run commands, as many at once as there are cores."""
    at_once = os.cpu_count() or 1
    for start in range(0, len(commands), at_once):
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands[start : start + at_once]
        ]
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs, strict=True):
            if process.returncode != 0:
                raise RuntimeError(f"the doubles of CUDA and NCCL do not compile:\n{output}")
