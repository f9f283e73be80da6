"""The NVIDIA driver that the CUDA half of the native core needs."""

from __future__ import annotations

from gpudist.native import native as _native

# Oldest driver by CUDA major version: a driver accepts the machine code of every compiler of its
# own major version. https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}
_OLDEST = min(OLDEST_DRIVER)


def cuda_version(number: int) -> str:
    """Format CUDA's version number: ``13000`` is ``"13.0"``."""
    return f"{number // 1000}.{number % 1000 // 10}"


def oldest_driver(compiler: int) -> str:
    """Return the oldest driver for kernels that CUDA ``compiler`` compiled, as a phrase."""
    major = compiler // 1000
    return f"driver {OLDEST_DRIVER.get(major, f'for CUDA {major}')} or later"


def what_the_driver_lacks(compiler: int, driver: int) -> str:
    """Return why this driver cannot run this build and the remedy; empty if it can.

    Args:
        compiler: CUDA version that compiled the kernels, such as ``12090``.
        driver: newest CUDA version that the driver supports; 0 without a driver.
    """
    if driver == 0 or driver // 1000 >= compiler // 1000:
        return ""
    text = (
        f"gpudist's CUDA half is built with CUDA {cuda_version(compiler)} and needs "
        f"{oldest_driver(compiler)}, but this driver supports CUDA up to {cuda_version(driver)}; "
        f"update the driver"
    )
    if compiler // 1000 == _OLDEST:
        return text
    # A wheel's kernels are of the oldest major version, so this is a build of the user's.
    return (
        f"{text}, or install the wheel, which needs driver {OLDEST_DRIVER[_OLDEST]} or later and "
        f"keeps your torch: pip install --force-reinstall --no-deps --only-binary gpudist gpudist"
    )


def what_this_driver_lacks() -> str:
    """Return :func:`what_the_driver_lacks` for this build and this machine."""
    cuda = _native.cuda_information() if _native is not None else None
    if not cuda:
        return ""
    return what_the_driver_lacks(cuda["compiler_version"], cuda["driver_version"])
