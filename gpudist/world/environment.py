"""Describe this installation and this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from gpudist.errors import NotBuiltError
from gpudist.native import native as _native
from gpudist.transport import TRANSPORTS
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.transport.nccl.driver import cuda_version, oldest_driver, what_this_driver_lacks
from gpudist.transport.nccl.library import (
    installed_wheels,
    wheel_libraries,
    wheel_warnings,
)
from gpudist.world.launch import Built, Settings
from gpudist.world.links import GpuLink, gpu_links
from gpudist.world.runtime import build_info, settings

# The oldest and the newest torch on which the whole test suite passes: `make compatibility`.
TESTED_TORCH = ("2.11", "2.15")


@dataclass(frozen=True)
class Cuda:
    """CUDA part of the native core.

    Attributes:
        compiler: CUDA version that compiled the kernels, such as ``"12.9"``.
        needs: oldest driver for them, such as ``"driver 525.60.13 or later"``.
        driver: newest CUDA version that the driver supports; ``None`` without a driver.
        devices: number of visible GPUs.
        error: CUDA's error message if no GPU is visible, otherwise ``""``.
    """

    compiler: str
    needs: str
    driver: str | None
    devices: int
    error: str


@dataclass(frozen=True)
class Device:
    """GPU visible to torch."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Nccl:
    """NCCL library loaded in this process.

    Attributes:
        version: version string, such as ``"2.27.5"``.
        path: path of the library file.
        found: where it was found: ``"already in the process"``, ``"GPUDIST_NCCL_LIBRARY"``,
            ``"nvidia-nccl wheel"`` or ``"system"``.
        features: features beyond those of the oldest supported version.
    """

    version: str
    path: str
    found: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class TransportState:
    """Availability of a transport; ``reason`` says why it does not work, or what it is for."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Environment:
    """Result of :func:`describe`.

    Attributes:
        gpudist, python, torch: version strings.
        torch_cuda: CUDA version that torch was built for, or ``None``.
        tested_torch: oldest and newest torch version that gpudist is tested with.
        torch_is_tested: whether the installed torch lies in this range.
        native_core: whether the native core is built; ``native_core_missing`` says why not.
        cuda: CUDA part of the native core, ``None`` in a build without CUDA.
        devices: GPUs visible to torch.
        nccl: NCCL library, ``None`` if no usable one was found; ``nccl_missing`` says why.
        transport: transport that ``gpudist.init()`` would use; ``transport_reason`` says why.
        transports: availability of every transport on this machine.
        links: links between the GPUs.
        warnings: conflicts between installed packages, each with its remedy.
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
    links: tuple[GpuLink, ...]
    warnings: tuple[str, ...]


def describe(asked: Settings | None = None) -> Environment:
    """Describe this installation and this machine without joining a world.

    This loads NCCL if it is not loaded yet; the process then keeps using that library.

    Args:
        asked: settings to report, by default those of this process's environment.
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
        transports=_transports(build_info(), nccl_missing),
        links=gpu_links(),
        warnings=tuple(
            warning
            for warning in (
                *wheel_warnings(installed_wheels(), torch.version.cuda),
                what_this_driver_lacks(),
            )
            if warning
        ),
    )


def is_tested(version: str) -> bool:
    """Return whether a torch version such as ``"2.13.0+cpu"`` is in the tested range."""
    oldest, newest = TESTED_TORCH
    return numbers(oldest) <= numbers(version) <= numbers(newest)


def numbers(version: str) -> tuple[int, int]:
    """Return major and minor version: ``(2, 13)`` for ``"2.13.0+cpu"``."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _transports(built: Built, nccl_missing: str) -> tuple[TransportState, ...]:
    no_gpus = built.nccl_missing or nccl_missing or ("" if built.gpus else "torch sees no GPU")
    no_gloo = "" if dist.is_gloo_available() else "this torch is built without gloo"
    missing = {"nccl": no_gpus, "host": built.host_missing, "gloo": no_gloo}
    return tuple(
        TransportState(name, not missing.get(name), missing.get(name) or kind.connects)
        for name, kind in TRANSPORTS.items()
    )


def nccl_version(number: int) -> str:
    """Format NCCL's version number: ``22705`` is ``"2.27.5"``."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _own_version() -> str:
    try:
        return version("gpudist")
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> Cuda | None:
    facts = _native.cuda_information() if _native is not None else None
    if facts is None:
        return None
    driver = facts["driver_version"]
    return Cuda(
        compiler=cuda_version(facts["compiler_version"]),
        needs=oldest_driver(facts["compiler_version"]),
        driver=cuda_version(driver) if driver else None,
        devices=facts["device_count"],
        error=facts["error"],
    )


def _devices() -> tuple[Device, ...]:
    if not torch.cuda.is_available():
        return ()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Device(device.name, device.total_memory) for device in gpus)


def _nccl(path: str) -> tuple[Nccl | None, str]:
    """Return the NCCL library, or the reason why it cannot be used.

    Torch has already been imported, so a library bundled with it is loaded.
    """
    if _native is None:
        return None, "only the native core can open it"
    try:
        facts = _native.nccl_information(path, [str(library) for library in wheel_libraries()])
    except NotBuiltError as error:
        return None, str(error)
    features = {
        "windows": facts["has_windows"],
        "several ranks on one GPU": facts["has_shared_gpus"],
    }
    return Nccl(
        version=nccl_version(facts["version"]),
        path=facts["path"],
        found=facts["found"],
        features=tuple(name for name, is_there in features.items() if is_there),
    ), ""
