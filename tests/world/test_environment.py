"""The report on an installation, with made-up wheels, core and torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gpudist.errors import NotBuiltError
from gpudist.transport.nccl import library as nccl_library
from gpudist.transport.nccl.driver import what_the_driver_lacks
from gpudist.transport.nccl.library import (
    installed_wheels,
    order_launches,
    wheel_libraries,
    wheel_warnings,
)
from gpudist.world import environment
from gpudist.world.environment import Cuda, Device, Nccl, describe
from gpudist.world.launch import Settings

ASKED = Settings("host", "2 processes on one node", "", "", False)


class Core:
    """Native core that reports what the test sets."""

    def __init__(
        self, cuda: dict[str, object] | None = None, missing: str = "", version: int = 22705
    ) -> None:
        self._version = version
        self._cuda = cuda
        self._missing = missing
        self.asked: tuple[str, list[str]] | None = None

    def cuda_information(self) -> dict[str, object] | None:
        return self._cuda

    def nccl_information(self, path: str, wheel_paths: list[str]) -> dict[str, object]:
        self.asked = path, wheel_paths
        if self._missing:
            raise NotBuiltError(self._missing)
        return {
            "path": "/x/libnccl.so.2",
            "found": "system",
            "version": self._version,
            "has_windows": True,
            "has_shared_gpus": False,
        }


def install_wheel(folder: Path, name: str, version: str) -> None:
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    library = folder / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True, exist_ok=True)
    (folder / "nvidia/nccl/__init__.py").touch()
    library.touch()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages, the only one."""

    def of_nvidia() -> dict[str, ModuleType]:
        return {name: sys.modules[name] for name in sys.modules if name.split(".")[0] == "nvidia"}

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    before = of_nvidia()
    for name in before:
        del sys.modules[name]
    yield tmp_path
    for name in of_nvidia():
        del sys.modules[name]
    sys.modules.update(before)


def test_no_wheel(site: Path) -> None:
    assert wheel_libraries() == []
    assert installed_wheels() == {}


def test_a_wheel(site: Path) -> None:
    install_wheel(site, "nvidia-nccl-cu13", "2.30.7")
    assert wheel_libraries() == [site / "nvidia/nccl/lib/libnccl.so.2"]
    assert installed_wheels() == {13: "2.30.7"}


def test_a_wheel_whose_library_is_gone(site: Path) -> None:
    install_wheel(site, "nvidia-nccl-cu13", "2.30.7")
    (site / "nvidia/nccl/lib/libnccl.so.2").unlink()
    assert wheel_libraries() == []


def test_other_packages_of_nvidia(site: Path) -> None:
    (site / "nvidia/cublas").mkdir(parents=True)
    assert wheel_libraries() == []


def test_both_wheels(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_wheel(site, "nvidia-nccl-cu12", "2.27.5")
    install_wheel(site, "nvidia-nccl-cu13", "2.30.7")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment, "_native", Core())
    assert describe(ASKED).warnings == (
        "nvidia-nccl-cu12 2.27.5 and nvidia-nccl-cu13 2.30.7 are both installed and overwrite each "
        "other's files: pip uninstall nvidia-nccl-cu12 nvidia-nccl-cu13, then pip install "
        "nvidia-nccl-cu13",
    )


@pytest.mark.parametrize(
    ("installed", "torch_cuda", "warning"),
    [
        ({}, "12.8", None),
        ({12: "2.27.5"}, "12.8", None),
        ({13: "2.30.7"}, "13.0", None),
        ({12: "2.27.5"}, None, None),
        (
            {12: "2.27.5"},
            "13.0",
            "torch is built for CUDA 13.0, but nvidia-nccl-cu12 2.27.5 is installed: "
            "pip uninstall nvidia-nccl-cu12, then pip install nvidia-nccl-cu13",
        ),
        (
            {13: "2.30.7"},
            "12.8",
            "torch is built for CUDA 12.8, but nvidia-nccl-cu13 2.30.7 is installed: "
            "pip uninstall nvidia-nccl-cu13, then pip install nvidia-nccl-cu12",
        ),
    ],
)
def test_a_wheel_and_a_torch(
    installed: dict[int, str], torch_cuda: str | None, warning: str | None
) -> None:
    assert wheel_warnings(installed, torch_cuda) == ([warning] if warning else [])


def test_both_wheels_and_a_torch_without_cuda() -> None:
    (warning,) = wheel_warnings({12: "2.27.5", 13: "2.30.7"}, None)
    assert warning.endswith("then pip install the one of your CUDA")


def test_without_a_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_native", None)
    monkeypatch.setattr(environment, "is_built", lambda: False)
    found = describe(ASKED)
    assert not found.native_core and "no native core" in found.native_core_missing
    assert found.cuda is None
    assert found.nccl is None and found.nccl_missing == "only the native core can open it"


def test_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_native", Core(missing="there is no NCCL"))
    found = describe(ASKED)
    assert (found.nccl, found.nccl_missing) == (None, "there is no NCCL")


def test_nccl(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_wheel(site, "nvidia-nccl-cu12", "2.27.5")
    core = Core()
    monkeypatch.setattr(environment, "_native", core)
    found = describe(Settings("host", "why", "/given", "", False))
    assert core.asked == ("/given", [str(site / "nvidia/nccl/lib/libnccl.so.2")])
    assert found.nccl == Nccl("2.27.5", "/x/libnccl.so.2", "system", ("windows",))
    assert (found.transport, found.transport_reason) == ("host", "why")


@pytest.mark.parametrize(
    ("backend", "version", "chosen", "expected"),
    [
        ("cpu:gloo,cuda:nccl", 22600, {}, "1"),
        ("nccl", 22703, {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, "0"),
        ("nccl", 22505, {}, None),
        ("gloo", 22703, {}, None),
        (None, 22703, {}, None),
    ],
)
def test_the_order_of_kernels_beside_torchs(
    backend: str | None,
    version: int,
    chosen: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(nccl_library, "_native", Core(version=version))
    order_launches(variables := dict(chosen), "")
    assert variables.get("NCCL_LAUNCH_ORDER_IMPLICIT") == expected
    assert len(variables) == (expected is not None)


NEEDS = "driver 580.65.06 or later"


@pytest.mark.parametrize(
    ("driver", "error", "expected"),
    [
        (13010, "", Cuda("13.0", NEEDS, "13.1", 4, "")),
        (0, "insufficient driver", Cuda("13.0", NEEDS, None, 4, "insufficient driver")),
    ],
)
def test_cuda(driver: int, error: str, expected: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: dict[str, object] = {
        "compiler_version": 13000, "driver_version": driver, "device_count": 4, "error": error,
    }  # fmt: skip
    monkeypatch.setattr(environment, "_native", Core(cuda))
    assert describe(ASKED).cuda == expected


@pytest.mark.parametrize(
    ("compiler", "driver", "lacking"),
    [
        (13000, 0, ""),
        (13000, 13010, ""),
        (12090, 12000, ""),  # every driver of CUDA 12 accepts machine code of all its compilers
        (12090, 13000, ""),
        (12090, 11080, "needs driver 525.60.13 or later, but this driver supports CUDA up to 11.8"),
        (13000, 12080, "needs driver 580.65.06 or later, but this driver supports CUDA up to 12.8"),
        (15000, 13000, "needs driver for CUDA 15 or later, but this driver"),
    ],
)
def test_a_driver_that_is_too_old(compiler: int, driver: int, lacking: str) -> None:
    said = what_the_driver_lacks(compiler, driver)
    assert lacking in said and bool(said) is bool(lacking)
    assert not said or "update the driver" in said
    # A wheel helps only a build with a later compiler.
    assert ("--only-binary" in said) is (bool(said) and compiler >= 13000)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_native", Core())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda i: SimpleNamespace(name=f"GPU {i}", total_memory=2**30),
    )
    assert describe(ASKED).devices == (Device("GPU 0", 2**30), Device("GPU 1", 2**30))
