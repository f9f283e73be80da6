"""Where NCCL's wheels keep it, and whether the installed ones can work."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from gpudist.transport.host import what_is_missing

try:
    import gpudist._native as _native
except ImportError:
    _native = None

# Both install the same files.
_WHEELS = {12: "nvidia-nccl-cu12", 13: "nvidia-nccl-cu13"}


def what_nccl_misses() -> str:
    """Why this installation cannot use GPUs, and how to change that; empty if it can."""
    if _native is None:
        return what_is_missing()
    return _native.device_missing()


def wheel_libraries() -> list[Path]:
    """Where the nvidia-nccl wheels keep their library, if one is installed."""
    try:
        package = find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # not even the package around it
        return []
    if package is None or package.submodule_search_locations is None:
        return []
    paths = [Path(folder) / "lib/libnccl.so.2" for folder in package.submodule_search_locations]
    return [path for path in paths if path.exists()]


def installed_wheels() -> dict[int, str]:
    """The version of each installed NCCL wheel, by the major version of CUDA it is for."""
    found: dict[int, str] = {}
    for cuda, name in _WHEELS.items():
        try:
            found[cuda] = version(name)
        except PackageNotFoundError:
            continue
    return found


def wheel_warnings(installed: dict[int, str], torch_cuda: str | None) -> list[str]:
    """What is wrong with the installed NCCL wheels, and the remedy.

    Args:
        installed: as ``installed_wheels()`` has it.
        torch_cuda: the version of CUDA that torch is built for, such as ``"13.0"``.
    """
    wanted = int(torch_cuda.partition(".")[0]) if torch_cuda else None
    names = [f"{_WHEELS[cuda]} {installed[cuda]}" for cuda in installed]
    if len(installed) > 1:
        keep = _WHEELS.get(wanted or 0, "the one of your CUDA")
        return [
            f"{' and '.join(names)} are both installed and overwrite each other's files: "
            f"pip uninstall {' '.join(_WHEELS.values())}, then pip install {keep}"
        ]
    if wanted in _WHEELS and installed and wanted not in installed:
        (cuda,) = installed
        return [
            f"torch is built for CUDA {torch_cuda}, but {names[0]} is installed: "
            f"pip uninstall {_WHEELS[cuda]}, then pip install {_WHEELS[wanted]}"
        ]
    return []
