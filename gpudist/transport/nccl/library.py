"""Find the NCCL library and check the installed NCCL wheels."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist

from gpudist.native import native as _native
from gpudist.transport.host.core_transport import what_is_missing

# NCCL wheel by CUDA major version. Both install the same files.
_WHEELS = {12: "nvidia-nccl-cu12", 13: "nvidia-nccl-cu13"}
# First NCCL that keeps the host's order among kernels of several communicators, and its variable.
_FIRST_ORDERED = 22600
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def order_launches(variables: MutableMapping[str, str], path: str) -> None:
    """Let kernels of gpudist's and of torch's communicators start in the host's order.

    Otherwise two ranks may start them in different orders, and each kernel waits for the other
    rank's. NCCL reads the variable when the process starts its first kernel.

    Args:
        variables: environment of this process; a value that it has stands.
        path: path of the NCCL library; empty to search for one.
    """
    torch_uses_nccl = dist.is_initialized() and "nccl" in dist.get_backend_config()
    if _ORDER in variables or not torch_uses_nccl or _native is None:
        return
    nccl = _native.nccl_information(path, [str(library) for library in wheel_libraries()])
    if nccl["version"] >= _FIRST_ORDERED:
        variables[_ORDER] = "1"


def what_nccl_misses() -> str:
    """Return why this installation cannot use GPUs and the remedy; empty if it can."""
    if _native is None:
        return what_is_missing()
    return _native.device_missing()


def wheel_libraries() -> list[Path]:
    """Return the paths of the NCCL libraries in installed nvidia-nccl wheels."""
    try:
        package = find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # The parent package is also missing.
        return []
    if package is None or package.submodule_search_locations is None:
        return []
    paths = [Path(folder) / "lib/libnccl.so.2" for folder in package.submodule_search_locations]
    return [path for path in paths if path.exists()]


def installed_wheels() -> dict[int, str]:
    """Return the version of each installed NCCL wheel, by its CUDA major version."""
    versions: dict[int, str] = {}
    for cuda, name in _WHEELS.items():
        try:
            versions[cuda] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def wheel_warnings(installed: dict[int, str], torch_cuda: str | None) -> list[str]:
    """Return conflicts of the installed NCCL wheels, each with its remedy.

    Args:
        installed: result of :func:`installed_wheels`.
        torch_cuda: CUDA version that torch was built for, such as ``"13.0"``.
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
