"""The NVIDIA driver that the CUDA half of the native core needs."""

from __future__ import annotations

try:
    import gpudist._native as _native
except ImportError:
    _native = None

# Oldest driver by CUDA major version: a driver runs every runtime of its own major version.
OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}


def cuda_version(number: int) -> str:
    """Format CUDA's version number: ``13000`` is ``"13.0"``."""
    return f"{number // 1000}.{number % 1000 // 10}"


def oldest_driver(runtime: int) -> str:
    """Return the oldest driver for a CUDA runtime such as ``13000``, as a phrase."""
    major = runtime // 1000
    return f"driver {OLDEST_DRIVER.get(major, f'for CUDA {major}')} or later"


def what_the_driver_lacks(runtime: int, driver: int) -> str:
    """Return why this driver cannot run this build and the remedy; empty if it can.

    Args:
        runtime: CUDA version of the build, such as ``13000``.
        driver: newest CUDA version that the driver supports; 0 without a driver.
    """
    if driver == 0 or driver // 1000 >= runtime // 1000:
        return ""
    return (
        f"gpudist's CUDA half is built with CUDA {cuda_version(runtime)} and needs "
        f"{oldest_driver(runtime)}, but this driver supports CUDA up to {cuda_version(driver)}; "
        f"update the driver, or put nvcc of CUDA {driver // 1000} into PATH and build gpudist, "
        f"which keeps your torch: GPUDIST_CUDA=on pip install --force-reinstall --no-deps "
        f"--no-cache-dir --no-binary gpudist gpudist"
    )


def what_this_driver_lacks() -> str:
    """Return :func:`what_the_driver_lacks` for this build and this machine."""
    found = _native.cuda_information() if _native is not None else None
    return what_the_driver_lacks(found["compiler_version"], found["driver_version"]) if found else ""
