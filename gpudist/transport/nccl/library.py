"""Where NCCL's wheels keep it, and whether the installed ones can work."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist

from gpudist.transport.host.transport import what_is_missing

try:
    import gpudist._native as _native
except ImportError:
    _native = None

# Both install the same files.
_WHEELS = {12: "nvidia-nccl-cu12", 13: "nvidia-nccl-cu13"}
# Whether NCCL uses registered memory in place: of those who register, and of captured graphs.
_REGISTRATION = ("NCCL_LOCAL_REGISTER", "NCCL_GRAPH_REGISTER")


def registration(variables: Mapping[str, str]) -> dict[str, str]:
    """What NCCL is told about registered memory, and who chose it, by variable.

    NCCL decides on each side of a message alone whether memory is registered, and a message between
    the two kinds hangs or brings old cells. Messages of gpudist's are alike on both sides whatever
    is said here; that NCCL registers nothing is a second belt.

    Args:
        variables: of the environment.
    """
    told: dict[str, str] = {}
    for name in _REGISTRATION:
        if name in _chosen:
            told[name] = f"{variables.get(name)} (gpudist's choice)"
        elif name in variables:
            told[name] = f"{variables[name]} (set before)"
        elif _nccl_is_in_use():
            told[name] = "NCCL's default (torch uses NCCL already)"
        else:
            told[name] = "0 (gpudist's choice, from init() on)"
    return told


def keep_memory_unregistered(variables: MutableMapping[str, str]) -> None:
    """Let NCCL register nothing, unless the user chose, or NCCL has looked by now."""
    if _nccl_is_in_use():
        return
    for name in _REGISTRATION:
        if name not in variables:
            variables[name] = "0"
            _chosen.add(name)


_chosen: set[str] = set()


def _nccl_is_in_use() -> bool:
    """Whether torch has a group over NCCL, which reads its variables once."""
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


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
