"""PTX as nvcc writes it: kernels of instructions, with their labels and registers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

_ENTRY = re.compile(r"(?:\.visible |\.weak )?\.entry (\w+)\(")
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.\w+ (\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared \.align (\d+) \.\w(\d+) (\w+)(?:\[(\d+)\])?;")
_LABEL = re.compile(r"(\$\w+):$")
_GUARD = re.compile(r"@(!?%p\d+)\s+")
_REGISTER = re.compile(r"%(?:pd|p|rs|r|rd|fd|f|h|hh|b|bd)\d+$")
# Directives of an entry that do not change its results.
_IGNORED = (".version", ".target", ".address_size", ".file", ".loc", ".section", ".pragma")
_BOUNDS = (".maxntid", ".minnctapersm", ".reqntid", ".maxnreg")
# Parts of an opcode that tell of caches and memory order, which one thread at a time does not see.
_HINTS = re.compile(
    r"(nc|ca|cg|cs|lu|cv|wb|wt|volatile|weak|relaxed|acquire|release|sys|gpu|cta|uni|rn|rni"
    r"|L1::\w+|L2::\w+|aligned)$"
)
_KEEPS_ROUNDING = ("cvt",)


class UnknownAssembly(RuntimeError):
    """The PTX contains something that this reader does not support."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        line: number in the PTX, from 1.
        guard: predicate register, with ``!`` before it if it is negated; empty without one.
        opcode: as written.
        operands: as written; a vector is one operand, in braces.
    """

    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @cached_property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @property
    def operation(self) -> str:
        return self.parts[0]

    @property
    def operand_type(self) -> str:
        """The last type that the opcode names, such as ``u32``."""
        return self.parts[-1]

    @cached_property
    def meaning(self) -> str:
        """Opcode without modifiers that do not affect a single thread."""
        if self.operation in _KEEPS_ROUNDING:
            return self.opcode
        return ".".join(part for part in self.parts if not _HINTS.match(part))

    @property
    def is_memory(self) -> bool:
        return self.operation in ("ld", "st", "ldu")

    @property
    def writes_memory(self) -> bool:
        return self.operation in ("st", "red", "atom")

    @cached_property
    def registers(self) -> list[list[str]]:
        """Registers of each operand."""
        return [registers_of(operand) for operand in self.operands]

    @property
    def written(self) -> list[str]:
        """Registers that are written."""
        if not self.operands or self.operation in ("st", "bra", "bar", "ret", "red"):
            return []
        return self.registers[0]

    @property
    def read(self) -> list[str]:
        """Registers whose value matters, the guard's among them."""
        first = 0 if not self.written else 1
        values = [name for names in self.registers[first:] for name in names]
        return values + ([self.guard.lstrip("!")] if self.guard else [])

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)};"


@dataclass
class Kernel:
    """One entry of a module.

    Attributes:
        name: mangled.
        parameter: name of its only parameter.
        parameter_bytes: size of that.
        labels: index of the instruction that follows each label.
        shared: offset of each array in the block's shared memory.
    """

    name: str
    parameter: str = ""
    parameter_bytes: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0

    def successors(self, index: int) -> list[int]:
        """Indices of the instructions that may follow one."""
        instruction = self.instructions[index]
        if instruction.operation == "bra":
            target = self.labels[instruction.operands[0]]
            return [target, index + 1] if instruction.guard else [target]
        if instruction.operation in ("ret", "exit", "trap") and not instruction.guard:
            return []
        return [index + 1]


def registers_of(operand: str) -> list[str]:
    return [name for name in re.findall(r"%\w+", operand) if _REGISTER.match(name)]


def split(text: str) -> list[str]:
    """Return the parts between the commas that are in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def read(text: str) -> list[Kernel]:
    """Return the kernels of a PTX module.

    Raises:
        UnknownAssembly: a line cannot be parsed.
    """
    kernels: list[Kernel] = []
    kernel: Kernel | None = None
    # Lines before all kernels that declare shared memory, of which every block has its own.
    shared: list[tuple[int, str]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = " ".join(raw.partition("//")[0].split())
        entry = _ENTRY.match(line)
        if entry:
            kernel = Kernel(entry[1])
            kernels.append(kernel)
            for declaration in shared:
                _read_line(kernel, *declaration)
        elif line == "}":
            kernel = None
        elif not line or line in (")", "{") or line.startswith(_IGNORED + _BOUNDS):
            continue
        elif kernel is None and _SHARED.match(line):
            shared.append((number, line))
        elif kernel is None:
            raise UnknownAssembly(f"line {number}, outside of kernels: {line}")
        else:
            _read_line(kernel, number, line)
    return kernels


def _read_line(kernel: Kernel, number: int, line: str) -> None:
    if line.startswith(".reg "):
        return
    if found := _PARAMETER.match(line):
        if kernel.parameter:
            raise UnknownAssembly(f"line {number}: {kernel.name} takes more than one parameter")
        kernel.parameter, kernel.parameter_bytes = found[1], int(found[2] or 8)
    elif found := _SHARED.match(line):
        start = -(-kernel.shared_bytes // int(found[1])) * int(found[1])
        kernel.shared[found[3]] = start
        kernel.shared_bytes = start + int(found[2]) // 8 * int(found[4] or 1)
    elif found := _LABEL.match(line):
        kernel.labels[found[1]] = len(kernel.instructions)
    elif line.endswith(";") and not line.startswith("."):
        guard = _GUARD.match(line)
        body = line[guard.end() if guard else 0 : -1]
        opcode, _, operands = body.partition(" ")
        kernel.instructions.append(
            Instruction(number, guard[1] if guard else "", opcode, tuple(split(operands)))
        )
    else:
        raise UnknownAssembly(f"line {number}, in {kernel.name}: {line}")
