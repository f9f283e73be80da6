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

ROOT = Path(__file__).resolve().parent
# From Python 3.12 on, one build serves all later versions.
STABLE_ABI = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
WITHOUT_CORE = """
warning: gpudist is installed WITHOUT ITS NATIVE CORE: {reason}
Processes of one node will use gloo, which is many times slower. GPUs, and ranks that are threads,
cannot be used. Install a C++17 compiler (Debian: apt-get install g++), then install gpudist again,
which keeps your torch:

    GPUDIST_NATIVE=on pip install --force-reinstall --no-deps --no-cache-dir {what}

"""


class CMakeBuild(build_ext):
    """Configure and build in a tree that is kept, so that only what changed is built again.

    Without CMake or a compiler the package is installed without its native core; the install and
    ``gpudist.init()`` then say so, and what to do. ``GPUDIST_NATIVE=on`` makes that an error,
    ``off`` leaves the core out. ``GPUDIST_CUDA`` is ``auto``, ``on`` or ``off`` likewise: without
    nvcc the core is built without its CUDA half.
    """

    def run(self) -> None:
        wanted = os.environ.get("GPUDIST_NATIVE", "auto")
        cuda = os.environ.get("GPUDIST_CUDA", "auto")
        if wanted == "off":
            return
        try:
            self._build(cuda)
        except (OSError, subprocess.CalledProcessError) as error:
            if "on" in (wanted, cuda):
                raise
            what = "-e ." if self.inplace or (ROOT / ".git").exists() else "gpudist"
            announce(WITHOUT_CORE.format(reason=_reason(error), what=what))

    def _build(self, cuda: str) -> None:
        import nanobind

        nvcc = _find_nvcc()
        tree = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        arguments = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DGPUDIST_CUDA={cuda.upper()}",
            *([f"-DGPUDIST_NVCC={nvcc}"] if nvcc else []),
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


def _reason(error: Exception) -> str:
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    if not any(name and shutil.which(name) for name in compilers):
        return "there is no C++ compiler in PATH"
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd[:2])} failed; pip install -v shows why"
    return str(error)


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


setup(
    ext_modules=[Extension("gpudist._native", sources=[], py_limited_api=STABLE_ABI)],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {},
    long_description=description(),
    long_description_content_type="text/markdown",
)
