"""Machine code of the kernels by ptxas: registers, thread-local memory, and memory accesses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

from tests.ptx.build import KERNELS, compiled_kernels, nvcc

_FUNCTION = re.compile(r"^\s*Function (\w+):\s*\n(.*)$", re.MULTILINE)
_PTXAS = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, "
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


class NoTool(RuntimeError):
    """A tool of the CUDA toolkit is missing."""


@dataclass(frozen=True)
class Resources:
    """Resources that one thread of a kernel uses."""

    registers: int
    stack_bytes: int
    local_bytes: int


def tool(name: str) -> str:
    """Return the path of ``cuobjdump`` or ``nvdisasm``.

    Raises:
        NoTool: neither the toolkit nor a wheel has it.
    """
    folders = [os.environ.get("PATH", ""), str(nvcc().resolve().parent)]
    folders += [
        f"{os.environ[home]}/bin" for home in ("CUDA_HOME", "CUDA_PATH") if home in os.environ
    ]
    folders += ["/usr/local/cuda/bin", f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin"]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise NoTool(f"no {name} beside nvcc, in PATH or CUDA_HOME: pip install nvidia-cuda-{name}")
    return found


def spills(architecture: int, name: str = KERNELS[0]) -> dict[str, tuple[int, int]]:
    """Return ptxas's counts per kernel: registers, and bytes of stack and spills."""
    log = (compiled_kernels(architecture, name) / "log.txt").read_text()
    return {
        kernel: (int(registers), int(stack) + int(stores) + int(loads))
        for kernel, found, stack, stores, loads, registers in _PTXAS.findall(log)
        if int(found) == architecture
    }


def resources(architecture: int, name: str = KERNELS[0]) -> dict[str, Resources]:
    """Return the resources that cuobjdump reads in the machine code of each kernel."""
    cubin = compiled_kernels(architecture, name) / f"sm_{architecture}.cubin"
    command = [tool("cuobjdump"), "-res-usage", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    made = {}
    for kernel, line in _FUNCTION.findall(text):
        numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", line))
        made[kernel] = Resources(*(int(numbers[key]) for key in ("REG", "STACK", "LOCAL")))
    return made


def _bodies(architecture: int, name: str) -> dict[str, str]:
    cubin = compiled_kernels(architecture, name) / f"sm_{architecture}.cubin"
    command = [tool("nvdisasm"), str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    _, *parts = _SECTION.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def opcodes(architecture: int, name: str = KERNELS[0]) -> dict[str, list[str]]:
    """Return the opcodes of each kernel's machine code, in their order."""
    return {kernel: _OPCODE.findall(body) for kernel, body in _bodies(architecture, name).items()}


def most_loads_in_flight(architecture: int, name: str = KERNELS[0]) -> dict[str, int]:
    """Return how many loads of 16 bytes a kernel issues before it uses the result of one."""
    return {kernel: max(_in_flight(body)) for kernel, body in _bodies(architecture, name).items()}


def _in_flight(body: str) -> Iterator[int]:
    loads, waited_for = 0, set[int]()
    for opcode, operands in _INSTRUCTION.findall(body):
        is_load = opcode.startswith("LDG.E") and ".128" in opcode
        # A load has its result first and then its address, of two registers.
        read = operands.partition(",")[2] if is_load else operands
        used = {int(number) for number in re.findall(r"\bR(\d+)", read)}
        if is_load:
            used |= {number + 1 for number in used}
        if used & waited_for or opcode.startswith(("BRA", "BRX", "EXIT")):
            loads, waited_for = 0, set()
        if is_load:
            loads += 1
            first = int(operands.partition(",")[0].removeprefix("R"))
            waited_for |= set(range(first, first + 4))
        yield loads
