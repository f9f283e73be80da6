"""Builds the native core with CMake; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configure and build in a tree that is kept, so that only what changed is built again.

    Without CMake or a compiler the package is installed without its native core; ``gpudist.init()``
    then says so, and what to install. ``GPUDIST_NATIVE=on`` makes that an error, ``off`` leaves the
    core out. ``GPUDIST_CUDA`` is ``auto``, ``on`` or ``off`` likewise: without nvcc the core is
    built without its CUDA half.
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
            print(
                f"warning: gpudist is installed without its native core: {error}", file=sys.stderr
            )

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
        subprocess.run(["cmake", "--build", str(tree), "--parallel"], check=True)
        target = ROOT if self.inplace else Path(self.build_lib).resolve()
        subprocess.run(["cmake", "--install", str(tree), "--prefix", str(target)], check=True)


def _find_nvcc() -> str | None:
    """The compiler that ``cmake/cuda.cmake`` would take: another one starts a new tree."""
    folders = [os.environ.get("PATH", "")]
    folders += [
        f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    folders += ["/usr/local/cuda/bin", f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


setup(
    ext_modules=[Extension("gpudist._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
