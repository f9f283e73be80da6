"""Our declarations of the CUDA driver agree with a cuda.h, if there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def cuda_include() -> Path:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    homes += ["/usr/local/cuda", str(wheels / "cuda_runtime"), str(wheels / "cu13")]
    for home in filter(None, homes):
        if (Path(home) / "include/cuda.h").exists():
            return Path(home) / "include"
    pytest.skip("needs cuda.h of a CUDA toolkit, or of the wheel nvidia-cuda-runtime")


def errors(csrc: Path) -> str:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", f"-I{csrc}"]
    command += ["-isystem", str(cuda_include()), str(ROOT / "tests/csrc/check_cuda_abi.cpp")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stderr


def test_declarations_agree_with_the_header() -> None:
    assert errors(ROOT / "csrc") == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cuMemAlloc_v2, (CudaAddress", "cuMemAlloc_v2, (int"),
        ("event_query, cuEventQuery", "event_query, cuEventCreate"),
        ("kCudaNotReady = 600", "kCudaNotReady = 34"),
    ],
)
def test_a_wrong_declaration_does_not_compile(tmp_path: Path, right: str, wrong: str) -> None:
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    header = csrc / "device" / "cuda_driver.h"
    text = header.read_text()
    assert right in text
    header.write_text(text.replace(right, wrong))
    assert "error" in errors(csrc)
