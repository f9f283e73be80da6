"""Find the NCCL library and check the installed NCCL wheels."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist

from gpudist.transport.host.core_transport import what_is_missing

try:
    import gpudist._native as _native
except ImportError:
    _native = None

# NCCL wheel by CUDA major version. Both install the same files.
_WHEELS = {12: "nvidia-nccl-cu12", 13: "nvidia-nccl-cu13"}
# Variables that control whether NCCL registers memory: memory of users, and in captured graphs.
_REGISTRATION = ("NCCL_LOCAL_REGISTER", "NCCL_GRAPH_REGISTER")


def registration(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of NCCL's memory registration and who chose them, by variable.

    NCCL determines separately on each side of a message whether memory is registered. A message
    between registered and unregistered memory hangs or delivers stale data. gpudist's messages use
    the same kind on both sides in any case; disabling registration is an additional safeguard.

    Args:
        variables: environment variables.

    Returns:
        Value of each variable, with who chose it in parentheses.
    """
    settings: dict[str, str] = {}
    for name in _REGISTRATION:
        if name in _chosen:
            settings[name] = f"{variables.get(name)} (gpudist's choice)"
        elif name in variables:
            settings[name] = f"{variables[name]} (set before)"
        elif _nccl_is_in_use():
            settings[name] = "NCCL's default (torch uses NCCL already)"
        else:
            settings[name] = "0 (gpudist's choice, from init() on)"
    return settings


def keep_memory_unregistered(variables: MutableMapping[str, str]) -> None:
    """Disable NCCL's memory registration unless the user has set it or NCCL is already in use."""
    if _nccl_is_in_use():
        return
    for name in _REGISTRATION:
        if name not in variables:
            variables[name] = "0"
            _chosen.add(name)


_chosen: set[str] = set()


def _nccl_is_in_use() -> bool:
    # NCCL reads its variables once, when torch creates its first group.
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


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
    found: dict[int, str] = {}
    for cuda, name in _WHEELS.items():
        try:
            found[cuda] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
