"""Find the Pythons of this machine, and make virtual environments of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


class NoPython(RuntimeError):
    """This machine has no Python of a version that is needed."""


def interpreter(version: str) -> Path:
    """Return the path of Python ``version``, such as ``"3.12"``, in ``PATH`` or among pyenv's.

    Raises:
        NoPython: there is none that starts.
    """
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    in_path = shutil.which(f"python{version}")
    found = [Path(in_path)] if in_path else []
    found += sorted(versions.glob(f"{version}.*/bin/python{version}"))
    for path in found:
        # Shims of pyenv exist for versions that are not selected, and fail.
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    raise NoPython(f"there is no python{version} in PATH or in {versions}; install it")


def new_environment(version: str, folder: Path) -> Path:
    """Make a virtual environment in ``folder``, in place of what is there; return its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter(version), "-m", "venv", folder], check=True)
    return folder / "bin" / "python"
