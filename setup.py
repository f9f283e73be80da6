"""Builds the native core with CMake, and the description; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
COMPILERS = ("c++", "g++", "clang++", "icpx")
# From Python 3.12 on, one build serves all later versions.
STABLE_ABI = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
WITHOUT_CORE = """
warning: gpudist is installed WITHOUT ITS NATIVE CORE: {reason}
Processes of one node will use gloo, which is many times slower. GPUs, and ranks that are threads,
cannot be used. Install a C++17 compiler (Debian: apt-get install g++), then install gpudist again,
which keeps your torch:

    GPUDIST_NATIVE=on pip install --force-reinstall --no-deps --no-cache-dir {what}

"""
ADVICE = (
    "whose output is above. Python's headers are needed too (Debian: apt-get install python3-dev). "
    "GPUDIST_CUDA=off leaves out the CUDA half; GPUDIST_NATIVE=off installs gpudist without its "
    "native core: then processes of one node use gloo, which is many times slower"
)


def missing_tool() -> str | None:
    """Return which tool of the native core's build this machine lacks, or None."""
    if not shutil.which("cmake"):
        return "there is no CMake in PATH"
    # CMake refuses a compiler that CXX names and that is missing: a slip, not a wish.
    if not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
        return "there is no C++ compiler in PATH"
    return None


def has_core() -> bool:
    """Return whether this install is to have a native core.

    ``GPUDIST_NATIVE`` is ``auto``, ``on`` or ``off``. Only ``off`` or, with ``auto``, a missing
    tool leaves the core out; such a wheel is tagged for any machine.
    """
    wanted = os.environ.get("GPUDIST_NATIVE", "auto")
    if wanted not in ("auto", "on", "off"):
        raise SystemExit(f"GPUDIST_NATIVE is {wanted!r}, but must be auto, on or off")
    is_needed = "on" in (wanted, os.environ.get("GPUDIST_CUDA", "auto"))
    return wanted != "off" and (is_needed or missing_tool() is None)


class AnnouncedBuild(build_py):
    """Say on the terminal that the native core is left out for want of a tool."""

    def run(self) -> None:
        super().run()
        if os.environ.get("GPUDIST_NATIVE") != "off" and not has_core():
            what = "-e ." if self.editable_mode or (ROOT / ".git").exists() else "gpudist"
            announce(WITHOUT_CORE.format(reason=missing_tool(), what=what))


class CMakeBuild(build_ext):
    """Configure and build in a tree that is kept, so that only what changed is built again.

    ``GPUDIST_CUDA`` is ``auto``, ``on`` or ``off``: with ``auto`` and without nvcc the core is
    built without its CUDA half. ``GPUDIST_NVRTC`` names a library of NVRTC that compiles the
    kernels instead of nvcc. ``GPUDIST_CUDA_ARCHITECTURES``, as in CMake, replaces the architectures
    of a release. Any error of CMake or of a compiler fails the install.
    """

    def run(self) -> None:
        missing = missing_tool()
        if missing:
            raise CompileError(f"the native core cannot be built: {missing}")
        try:
            self._build(os.environ.get("GPUDIST_CUDA", "auto"))
        except subprocess.CalledProcessError as error:
            step = " ".join(error.cmd[:2])
            raise CompileError(f"building the native core failed: {step}, {ADVICE}") from error

    def _build(self, cuda: str) -> None:
        import nanobind

        nvcc = _find_nvcc()
        nvrtc = os.environ.get("GPUDIST_NVRTC", "")
        architectures = os.environ.get("GPUDIST_CUDA_ARCHITECTURES", "")
        tree = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        arguments = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DGPUDIST_CUDA={cuda.upper()}",
            *([f"-DGPUDIST_NVCC={nvcc}"] if nvcc else []),
            f"-DGPUDIST_NVRTC={nvrtc}",
            *([f"-DGPUDIST_CUDA_ARCHITECTURES={architectures}"] if architectures else []),
            *(["-GNinja"] if shutil.which("ninja") else []),
        ]
        # The isolated environment of an earlier build is gone, and its paths would be remembered.
        stamp = tree / "arguments.txt"
        text = "\n".join([shutil.which("cmake") or "cmake", *arguments])
        if tree.exists() and (not stamp.exists() or stamp.read_text() != text):
            shutil.rmtree(tree)
        tree.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cmake", "-S", str(ROOT), "-B", str(tree), *arguments], check=True)
        stamp.write_text(text)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
        build = ["cmake", "--build", str(tree), "--parallel", *([jobs] if jobs else [])]
        subprocess.run(build, check=True)
        target = ROOT if self.inplace else Path(self.build_lib).resolve()
        subprocess.run(["cmake", "--install", str(tree), "--prefix", str(target)], check=True)


def announce(text: str) -> None:
    """Print ``text`` where the user sees it: pip hides the output of a build that succeeds."""
    print(text, file=sys.stderr)
    with suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(text)


def _find_nvcc() -> str | None:
    """The compiler that ``cmake/cuda.cmake`` would take: another one starts a new tree."""
    folders = [os.environ.get("PATH", "")]
    folders += [
        f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    folders += ["/usr/local/cuda/bin", f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def description() -> str:
    """Return the README for the package index, its links leading to the files of this version."""
    source = _only(r'^Source = "(.+)"$', "pyproject.toml")
    tag = "v" + _only(r'^__version__ = "(.+)"$', "gpudist/version.py")

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith((".svg", ".png")) else "blob"
        return f"]({source}/{kind}/{tag}/{link[1]})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\(((?!\w+:|#)[^)\s]+)\)", absolute, text)


def _only(pattern: str, file: str) -> str:
    (found,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return found


CORE = has_core()
setup(
    ext_modules=(
        [Extension("gpudist._native", sources=[], py_limited_api=STABLE_ABI)] if CORE else []
    ),
    cmdclass={"build_ext": CMakeBuild, "build_py": AnnouncedBuild},
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if CORE and STABLE_ABI else {},
    long_description=description(),
    long_description_content_type="text/markdown",
)
