"""Our declarations of NCCL agree with the nccl.h of the wheel, if it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpudist.transport.nccl.library import wheel_libraries

ROOT = Path(__file__).resolve().parents[2]
# Declarations of CUDA that nccl.h needs; its headers may not be installed.
CUDA_RUNTIME = """
#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
"""


def nccl_include() -> Path:
    for library in wheel_libraries():
        if (library.parents[1] / "include/nccl.h").exists():
            return library.parents[1] / "include"
    pytest.skip("needs nccl.h: the nvidia-nccl wheel is not installed")


def compile_check(include: Path, csrc: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (folder / "cuda_runtime.h").write_text(CUDA_RUNTIME)
    (folder / "cuda_fp16.h").write_text("")
    return subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", f"-I{csrc}",
         "-isystem", str(folder), "-isystem", str(include),
         str(ROOT / "tests/csrc/check_nccl_abi.cpp")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_declarations_agree_with_the_header(tmp_path: Path) -> None:
    compiled = compile_check(nccl_include(), ROOT / "csrc", tmp_path)
    assert compiled.returncode == 0, compiled.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kNcclBfloat16 = 9", "kNcclBfloat16 = 8"),
        ("int split_share = INT_MIN;\n", ""),
        ("char internal[128]", "char internal[64]"),
        ("0xcafebeef", "0xcafebabe"),
    ],
)
def test_a_wrong_declaration_does_not_compile(tmp_path: Path, right: str, wrong: str) -> None:
    include = nccl_include()
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    header = csrc / "nccl" / "nccl_abi.h"
    text = header.read_text()
    assert right in text
    header.write_text(text.replace(right, wrong))
    assert "error" in compile_check(include, csrc, tmp_path).stderr
