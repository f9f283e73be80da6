"""Builds nvcc's output for ``csrc/device/*.cu`` and this folder; kept in ``build/ptx``."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from tests.doubles import build as doubles
from tests.doubles.build import NoCompiler, run_all
from tests.ptx.assembly import read
from tests.ptx.program import encode

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "ptx"
ARCHITECTURES = (80, 90)
# Sources of kernels, and nvcc's flags for them, as in cmake/cuda.cmake.
UNITS: dict[str, list[str]] = {
    "combine_kernels": [], "random_cells": [], "norm_kernels": ["-fmad=false"],
}  # fmt: skip
# Those whose launches have plain loops to compare with.
KERNELS = ("combine_kernels", "random_cells")
# Files of csrc/core that plain loops and launches need.
CORE = ("combine_plan", "norm_plan", "packing_cpu", "random_cells")
# The host's part of the CUDA half, which loads the images and looks up the driver.
HOST = ("cuda_api", "cuda_driver", "cuda_kernels", "images")
# The driver that a library with this name is, in the process that loads it.
DRIVER = ("-shared", "-Wl,-soname,libcuda.so.1")
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"]
# Every product and sum is rounded, as in the native core.
FLAGS.append("-ffp-contract=off")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class NoNvcc(RuntimeError):
    """No nvcc was found, so this folder cannot be built."""


@lru_cache(maxsize=1)
def nvcc() -> Path:
    """Return the compiler.

    Raises:
        NoNvcc: there is none.
    """
    folders = [os.environ.get("PATH", "")]
    folders += [
        f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    found = shutil.which("nvcc", path=os.pathsep.join([*folders, "/usr/local/cuda/bin"]))
    if found is None:
        raise NoNvcc("no nvcc in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda/bin")
    return Path(found)


def digest_of(*parts: object) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def with_headers(source: Path, folders: tuple[Path, ...]) -> list[Path]:
    """Return a source file and every header of ours that it includes, directly or not."""
    found, waiting = [], [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        for name in _INCLUDE.findall(path.read_text()):
            waiting += [
                folder / name for folder in (path.parent, *folders) if (folder / name).exists()
            ]
    return sorted(found)


@lru_cache
def compiled_kernels(architecture: int, unit: str = KERNELS[0]) -> Path:
    """Return the folder with nvcc's PTX, machine code and log for one architecture."""
    source = CSRC / "device" / f"{unit}.cu"
    flags = ["-std=c++17", "-O3", "-Werror=all-warnings", "-Xptxas=-v", *UNITS[unit]]
    flags += ["-cubin", f"-arch=sm_{architecture}"]
    texts = [path.read_bytes() for path in with_headers(source, (CSRC,))]
    target = CACHE / f"kernels-{digest_of(unit, nvcc(), flags, *texts)}"
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        kept = Path(folder) / "kept"
        kept.mkdir()
        command = [str(nvcc()), *flags, "--keep", "--keep-dir", str(kept)]
        made = Path(folder) / "made"
        made.mkdir()
        cubin = made / f"sm_{architecture}.cubin"
        command += [f"-I{CSRC}", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            raise RuntimeError(
                f"csrc/device/{unit}.cu does not compile:\n{done.stdout}{done.stderr}"
            )
        (made / "log.txt").write_text(done.stdout + done.stderr)
        shutil.copy(next(kept.glob(f"{unit}*.ptx")), made / f"{unit}.compute_{architecture}")
        _put(made, target)
    return target


def ptx_of(architecture: int, unit: str = KERNELS[0]) -> str:
    return _ptx(architecture, unit).read_text()


def _ptx(architecture: int, unit: str) -> Path:
    return compiled_kernels(architecture, unit) / f"{unit}.compute_{architecture}"


def embedded_kernels(architecture: int) -> Path:
    """Return the source that has the PTX of all units, as the native core's has the images."""
    units = {unit: _ptx(architecture, unit) for unit in UNITS}
    units["combine_large"] = units["combine_kernels"]
    pairs = [f"{unit}={path}" for unit, path in units.items()]
    script = ROOT / "cmake" / "device_code.py"
    target = CACHE / f"images-{digest_of(script.read_bytes(), *pairs)}.cpp"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}")
        subprocess.run([sys.executable, script, "embed", nvcc(), made, *pairs], check=True)
        os.replace(made, target)
    return target


def encoded_kernels(architecture: int, *units: str) -> Path:
    """Return the file of the kernels that the machine reads."""
    texts = [ptx_of(architecture, unit) for unit in units]
    encoder = [(HERE / name).read_bytes() for name in ("assembly.py", "program.py")]
    target = CACHE / f"sm_{architecture}-{digest_of(*texts, *encoder)}.program"
    if not target.exists():
        made = target.with_suffix(f".{os.getpid()}")
        kernels = [kernel for text in texts for kernel in read(text)]
        lines = [line for kernel in kernels for line in encode(kernel)[0]]
        made.write_text("\n".join(lines) + "\n")
        os.replace(made, target)
    return target


def objects(sources: list[Path], *flags: str) -> list[Path]:
    """Return the compiled objects of C++ sources; only what changed is compiled."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NoCompiler("no c++ or g++ in PATH")
    folders = (HERE, CSRC, ROOT / "tests" / "doubles", ROOT / "tests" / "csrc")
    including = [f"-I{folder}" for folder in folders]
    CACHE.mkdir(parents=True, exist_ok=True)
    targets, commands, renames = [], [], []
    for source in sources:
        texts = [path.read_bytes() for path in with_headers(source, folders)]
        target = CACHE / f"{source.stem}-{digest_of(compiler, FLAGS, flags, *texts)}.o"
        targets.append(target)
        if not target.exists():
            made = target.with_suffix(f".{os.getpid()}")
            commands.append(
                [compiler, *FLAGS, *including, *flags, "-c", str(source), "-o", str(made)]
            )
            renames.append((made, target))
    run_all(commands)
    for made, target in renames:
        os.replace(made, target)
    return targets


def linked(name: str, parts: list[Path], *flags: str) -> Path:
    """Return the program or library of these objects."""
    target = CACHE / f"{digest_of(flags, *parts)}" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_name(f"{name}.{os.getpid()}")
        run_all([["c++", *map(str, parts), "-pthread", *flags, "-ldl", "-o", str(made)]])
        os.replace(made, target)
    return target


def driver_objects(architecture: int) -> list[Path]:
    """Return the objects of the machine, of the double of libcuda, and of what calls it."""
    parts = objects([HERE / f"{name}.cpp" for name in ("machine", "opcodes")])
    parts += objects([HERE / "runtime.cpp"], f"-DGPUDIST_PTX_CAPABILITY={architecture}")
    parts += objects([CSRC / "device" / f"{name}.cpp" for name in HOST])
    return parts + objects([embedded_kernels(architecture)])


def program(
    sources: list[Path], architecture: int, unit: str = KERNELS[0]
) -> tuple[Path, dict[str, str]]:
    """Return a program over plain memory, named by its first source, and its environment.

    It can launch the kernels of ``unit``.
    """
    main, *others = sources
    core = [CSRC / "core" / f"{name}.cpp" for name in CORE]
    parts = objects([main], "-fvisibility=default")
    parts += objects([*others, HERE / "host.cpp", *core]) + driver_objects(architecture)
    # All of it is a library, since only a library can be the driver.
    library = linked("libcuda.so.1", parts, *DRIVER)
    made = linked(main.stem, [library], f"-Wl,-rpath,{library.parent}")
    return made, os.environ | {"GPUDIST_PTX_PROGRAM": str(encoded_kernels(architecture, unit))}


def library(architecture: int) -> tuple[Path, dict[str, str]]:
    """Return the doubles with the compiled kernels in them, and the environment they need."""
    # The native core asks for one table: CUDA's, whose driver stands on the table of the doubles.
    parts = objects(doubles.sources(), "-Dgpudist_device_api=gpudist_double_device_api")
    parts += objects([HERE / "doubled.cpp"]) + driver_objects(architecture)
    made = linked("libnccl_double.so", parts, *doubles.LINKING, *DRIVER)
    heap = linked("libheap.so", objects([HERE / "heap.cpp"], "-fno-builtin"), "-shared")
    return made, {
        "LD_PRELOAD": str(heap),
        "GPUDIST_NCCL_LIBRARY": str(made),
        "GPUDIST_DEVICE_LIBRARY": str(made),
        "GPUDIST_PTX_PROGRAM": str(encoded_kernels(architecture, *UNITS)),
    }


def _put(made: Path, target: Path) -> None:
    try:
        os.replace(made, target)
    except OSError:
        if not target.exists():
            raise
