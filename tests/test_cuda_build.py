"""The kernels compile, and take no more of a GPU than the committed table says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "csrc" / "kernel_resources.txt"
ARCHITECTURES = ("80", "90")
MOST_REGISTERS = 64  # of 65536, so that 1024 threads run at once

_PTXAS = re.compile(
    r"Compiling entry function '\w*?\d(?P<kernel>[a-z_]+_kernel)(?:ILj(?P<bytes>\d+)E)?E\w*' "
    r"for '(?P<architecture>sm_\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def find_nvcc() -> str:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc in PATH or /usr/local/cuda/bin")
    return nvcc


def release_of(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+\.\d+)", text)
    assert release is not None, text
    return release[1]


def compile_kernels(nvcc: str, source: Path, target: Path) -> str:
    """What ptxas says of every kernel of ``source``."""
    code = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in ARCHITECTURES]
    flags = ["-std=c++17", "-O3", "-Werror=all-warnings", "-Xptxas=-v", "--threads=2", *code]
    command = [nvcc, *flags, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def resources(log: str) -> list[tuple[str, str, int, int, int]]:
    """Kernel, architecture, registers of a thread, bytes of stack and of spills."""
    return sorted(
        (
            found["kernel"] + (f"<{found['bytes']}>" if found["bytes"] else ""),
            found["architecture"],
            int(found["registers"]),
            int(found["stack"]),
            int(found["stores"]) + int(found["loads"]),
        )
        for found in _PTXAS.finditer(log)
    )


def table_of(release: str, rows: list[tuple[str, str, int, int, int]]) -> str:
    lines = [f"nvcc {release}", "kernel architecture registers stack_bytes spill_bytes"]
    return "\n".join([*lines, *(" ".join(map(str, row)) for row in rows)]) + "\n"


def test_kernels_fit_the_registers(tmp_path: Path):
    nvcc = find_nvcc()
    release = release_of(nvcc)
    rows = resources(compile_kernels(nvcc, ROOT / "csrc" / "cuda_api.cu", tmp_path / "kernels.o"))
    assert {row[1] for row in rows} == {f"sm_{n}" for n in ARCHITECTURES}
    assert {row[0].partition("<")[0] for row in rows} == {
        "combine_kernel",
        "combine_inlined_kernel",
    }
    for kernel, architecture, registers, stack_bytes, spill_bytes in rows:
        assert (stack_bytes, spill_bytes) == (0, 0), f"{kernel} spills on {architecture}: {rows}"
        assert registers <= MOST_REGISTERS, f"{kernel} on {architecture}: {rows}"
    table = table_of(release, rows)
    committed = TABLE.read_text()
    if committed.splitlines()[0] != f"nvcc {release}":
        pytest.skip(f"{TABLE.name} is of {committed.splitlines()[0]}, and this is {release}")
    assert table == committed, f"{TABLE.relative_to(ROOT)} would now be:\n{table}"
