"""What this installation and this machine can do."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from gpudist.errors import NotBuiltError
from gpudist.transport.host.transport import is_built, what_is_missing
from gpudist.transport.nccl.library import (
    installed_wheels,
    registration,
    wheel_libraries,
    wheel_warnings,
)
from gpudist.world.launch import Built, Settings
from gpudist.world.links import Link, gpu_links
from gpudist.world.runtime import built, nccl_variables, settings

try:
    import gpudist._native as _native
except ImportError:
    _native = None

# The oldest and the newest torch that the whole suite runs on: `make compatibility`.
TESTED_TORCH = ("2.11", "2.15")

_USES = {
    "nccl": "between GPUs",
    "host": "between processes of one node",
    "gloo": "between nodes without GPUs",
    "loopback": "threads of one process",
}


@dataclass(frozen=True)
class Cuda:
    """The CUDA half of the native core.

    Attributes:
        runtime: the version it was built with, such as ``"13.0"``.
        driver: the newest version the driver can run; ``None`` without a driver.
        devices: how many GPUs it sees.
        error: why it sees none, if CUDA says so.
    """

    runtime: str
    driver: str | None
    devices: int
    error: str


@dataclass(frozen=True)
class Device:
    """A GPU, as torch sees it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Nccl:
    """The NCCL of this process.

    Attributes:
        version: such as ``"2.27.5"``.
        path: the file.
        found: ``"already in the process"``, ``"GPUDIST_NCCL_LIBRARY"``, ``"nvidia-nccl wheel"`` or
            ``"system"``.
        features: what it has beyond the oldest that will do.
        registration: what it is told about registered memory, by variable.
    """

    version: str
    path: str
    found: str
    features: tuple[str, ...]
    registration: dict[str, str]


@dataclass(frozen=True)
class TransportState:
    """Whether a transport works here; ``reason`` says why not, or what it is for."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Environment:
    """What ``describe()`` found.

    Attributes:
        gpudist, python, torch: their versions.
        torch_cuda: the version of CUDA that torch is built for, or ``None``.
        tested_torch: the oldest and the newest torch that gpudist is tested on.
        torch_is_tested: whether this torch is one of these or between them.
        native_core: whether it is built; ``native_core_missing`` says why not.
        cuda: ``None`` in a build without it.
        devices: the GPUs that torch sees.
        nccl: ``None`` where there is none, or none that will do; ``nccl_missing`` says why.
        transport: what ``gpudist.init()`` would use; ``transport_reason`` says why.
        transports: all of them, and whether each works on this machine.
        links: between the GPUs.
        warnings: what does not go together, each with the remedy.
    """

    gpudist: str
    python: str
    torch: str
    torch_cuda: str | None
    tested_torch: tuple[str, str]
    torch_is_tested: bool
    native_core: bool
    native_core_missing: str
    cuda: Cuda | None
    devices: tuple[Device, ...]
    nccl: Nccl | None
    nccl_missing: str
    transport: str
    transport_reason: str
    transports: tuple[TransportState, ...]
    links: tuple[Link, ...]
    warnings: tuple[str, ...]


def describe(asked: Settings | None = None) -> Environment:
    """Look at everything and join nothing.

    Opens NCCL, unless it is open: it stays the one of this process.

    Args:
        asked: what the environment asks for; this process's, if ``None``.
    """
    asked = asked or settings()
    nccl, nccl_missing = _nccl(asked.nccl_library)
    return Environment(
        gpudist=_own_version(),
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        tested_torch=TESTED_TORCH,
        torch_is_tested=is_tested(torch.__version__),
        native_core=is_built(),
        native_core_missing="" if is_built() else what_is_missing(),
        cuda=_cuda(),
        devices=_devices(),
        nccl=nccl,
        nccl_missing=nccl_missing,
        transport=asked.transport,
        transport_reason=asked.reason,
        transports=_transports(built(), nccl_missing),
        links=gpu_links(),
        warnings=tuple(wheel_warnings(installed_wheels(), torch.version.cuda)),
    )


def is_tested(version: str) -> bool:
    """Whether a version of torch, such as ``"2.13.0+cpu"``, is in the tested range."""
    oldest, newest = TESTED_TORCH
    return numbers(oldest) <= numbers(version) <= numbers(newest)


def numbers(version: str) -> tuple[int, int]:
    """``"2.13.0+cpu"`` is 2 and 13."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _transports(found: Built, nccl_missing: str) -> tuple[TransportState, ...]:
    no_gpus = found.nccl_missing or nccl_missing or ("" if found.gpus else "torch sees no GPU")
    no_gloo = "" if dist.is_gloo_available() else "this torch is built without gloo"
    missing = {"nccl": no_gpus, "host": found.host_missing, "gloo": no_gloo, "loopback": ""}
    return tuple(TransportState(name, not why, why or _USES[name]) for name, why in missing.items())


def cuda_version(number: int) -> str:
    """13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def nccl_version(number: int) -> str:
    """22705 is 2.27.5."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _own_version() -> str:
    try:
        return version("gpudist")
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> Cuda | None:
    found = _native.cuda_information() if _native is not None else None
    if found is None:
        return None
    driver = found["driver_version"]
    return Cuda(
        runtime=cuda_version(found["runtime_version"]),
        driver=cuda_version(driver) if driver else None,
        devices=found["device_count"],
        error=found["error"],
    )


def _devices() -> tuple[Device, ...]:
    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Device(device.name, device.total_memory) for device in found)


def _nccl(path: str) -> tuple[Nccl | None, str]:
    """NCCL, or why there is none. Torch, which may bring one along, is loaded already."""
    if _native is None:
        return None, "only the native core can open it"
    try:
        found = _native.nccl_information(path, [str(library) for library in wheel_libraries()])
    except NotBuiltError as error:
        return None, str(error)
    features = {
        "windows": found["has_windows"],
        "several ranks on one GPU": found["has_shared_gpus"],
    }
    return Nccl(
        version=nccl_version(found["version"]),
        path=found["path"],
        found=found["found"],
        features=tuple(name for name, is_there in features.items() if is_there),
        registration=registration(nccl_variables()),
    ), ""
