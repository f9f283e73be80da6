"""Builds the native core with CMake; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configure and build in a tree that is kept, so that only what changed is built again.

    Without CMake or a compiler the package is installed without its native core; ``gpudist.init()``
    then says so, and what to install. ``GPUDIST_NATIVE=on`` makes that an error, ``off`` leaves the
    core out.
    """

    def run(self) -> None:
        wanted = os.environ.get("GPUDIST_NATIVE", "auto")
        if wanted == "off":
            return
        try:
            self._build()
        except (OSError, subprocess.CalledProcessError) as error:
            if wanted == "on":
                raise
            print(
                f"warning: gpudist is installed without its native core: {error}", file=sys.stderr
            )

    def _build(self) -> None:
        import nanobind

        tree = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        arguments = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            "-DCMAKE_BUILD_TYPE=Release",
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


setup(
    ext_modules=[Extension("gpudist._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
