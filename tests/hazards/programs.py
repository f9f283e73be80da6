"""Programs of a few operations: source code of a module, drawn step by step on meta tensors."""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MOST_CELLS, MOST_DIMS = 5000, 6
NAMES: dict[str, Any] = {"torch": torch, "F": F, "nn": nn}


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        out: the variable that it defines.
        lines: its code.
        uses: the variables that it reads, the main one first.
        attributes: what ``__init__`` makes for it, by name, as code.
    """

    out: str
    lines: tuple[str, ...]
    uses: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Program:
    """Steps in order; every variable that nobody reads is an output.

    Attributes:
        steps: the operations.
        returned: what ``forward`` returns, with ``OUTPUTS`` in place of the outputs.
    """

    steps: tuple[Step, ...]
    returned: str = "OUTPUTS"

    def source(self) -> str:
        made = [f"{n} = {code}" for step in self.steps for n, code in step.attributes]
        body = [line for step in self.steps for line in step.lines]
        read = {name for step in self.steps for name in step.uses}
        outputs = [step.out for step in self.steps if step.out not in read] or ["v0"]
        return "\n".join([
            "class Random(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(_attribute(line) for line in made),
            "    def forward(self, v0):",
            *(f"        {line}" for line in body),
            f"        return {self.returned.replace('OUTPUTS', ', '.join(outputs))}",
        ])  # fmt: skip

    @property
    def changes_in_place(self) -> bool:
        return any(len(step.lines) > 1 or "inplace" in "".join(step.lines) for step in self.steps)

    def module(self) -> nn.Module:
        names = dict(NAMES)
        exec(self.source(), names)
        return names["Random"]()

    def without(self, number: int) -> Program | None:
        """Remove one step, which its main input replaces; ``None`` if nothing would remain."""
        gone = self.steps[number]
        main = next(iter(gone.uses))
        if len(self.steps) == 1:
            return None
        kept = [_renamed(step, gone.out, main) for step in self.steps if step is not gone]
        return replace(self, steps=tuple(kept))


def _attribute(line: str) -> str:
    name, _, code = line.partition(" = ")
    if code.startswith("buffer "):
        return f"        self.register_buffer({name!r}, {code[7:]})"
    return f"        self.{name} = {code}"


def _renamed(step: Step, old: str, new: str) -> Step:
    if old not in step.uses:
        return step
    lines = tuple(_with_name(line, old, new) for line in step.lines)
    return replace(step, lines=lines, uses=tuple(new if n == old else n for n in step.uses))


def _words(line: str) -> list[str]:
    return re.split(r"(\W+)", line)


def _with_name(line: str, old: str, new: str) -> str:
    return "".join(new if word == old else word for word in _words(line))


class Drawing:
    """A program in the making: what operations draw from, and ask.

    Attributes:
        rng: for every choice.
        device: device of the values that operations are tried on; on "meta" no operation may read
            a value.
        values: the variables so far, by name.
    """

    def __init__(self, shape: tuple[int, ...], rng: random.Random, device: str = "meta") -> None:
        self.rng, self.device = rng, device
        self.values = {"v0": torch.randn(shape, device=device, requires_grad=True)}
        self.steps: list[Step] = []
        self.module = nn.Module()
        self._attributes: list[tuple[str, str]] = []
        self._uses: list[str] = []
        self._made = 0

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def between(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def dim(self, shape: tuple[int, ...]) -> int:
        return self.rng.randrange(len(shape))

    def dims(self, shape: tuple[int, ...], at_most: int = 3) -> tuple[int, ...]:
        count = self.between(1, min(at_most, len(shape)))
        return tuple(sorted(self.rng.sample(range(len(shape)), count)))

    def attribute(self, code: str) -> str:
        """Code of an attribute that ``__init__`` makes by ``code``."""
        name = f"m{self._made}"
        self._made += 1
        self._attributes.append((name, code))
        return f"self.{name}"

    def parameter(self, *shape: int) -> str:
        return self.attribute(f"nn.Parameter(0.5 * torch.randn({', '.join(map(str, shape))}))")

    def buffer(self, code: str) -> str:
        return self.attribute(f"buffer {code}")

    def other(self, shape: tuple[int, ...], broadcast: bool = False) -> str | None:
        """Another variable of this shape, or one that broadcasts to it."""

        def fits(found: tuple[int, ...]) -> bool:
            if not broadcast:
                return found == shape
            count = len(found)
            tail = shape[len(shape) - count :] if count else ()
            pairs = zip(found, tail, strict=False)
            return count <= len(shape) and all(n in (1, m) for n, m in pairs)

        names = [n for n, t in self.values.items() if fits(tuple(t.shape))]
        if not names:
            return None
        self._uses.append(self.rng.choice(names))
        return self._uses[-1]

    def extend(self, operation: Any) -> bool:
        """Add ``operation(drawing, variable, shape)`` if it is valid here."""
        x = self._next()
        self._attributes, self._uses = [], [x]
        code = operation(self, x, tuple(self.values[x].shape))
        if code is None:
            return False
        out = f"v{len(self.values)}"
        lines = [f"{out} = {code}"] if isinstance(code, str) else code
        lines = tuple(line.replace("OUT", out) for line in lines)
        # Operations make what any of their spellings would need.
        words = {word for line in lines for word in _words(line)}
        uses = tuple(n for n in dict.fromkeys(self._uses) if n in words)
        if not uses:
            return False
        for name, made in reversed(self._attributes):
            # An attribute may be made of earlier ones.
            words |= set(_words(made)) if name in words else set()
        step = Step(out, lines, uses, tuple(a for a in self._attributes if a[0] in words))
        value = self._tried(step)
        if value is None:
            return False
        self.values[out] = value
        self.steps.append(step)
        return True

    def _next(self) -> str:
        """The latest variable mostly; at times the largest of all, where most can happen."""
        names = [name for name, value in self.values.items() if value.dim()]
        chance = self.rng.random()
        if chance < 0.5:
            return names[-1]
        if chance < 0.8:
            return max(names, key=lambda name: self.values[name].numel())
        return self.rng.choice(names)

    def _tried(self, step: Step) -> torch.Tensor | None:
        """Return the result, ``None`` if torch raises or the result is unusable."""
        names: dict[str, Any] = {**NAMES, "self": self.module}
        names |= {name: self.values[name] for name in step.uses}
        before = [t._version for t in self.values.values()]
        try:
            with torch.device(self.device):
                for name, code in step.attributes:
                    setattr(self.module, name, eval(code.removeprefix("buffer "), names))
                # Within a function, lines may return.
                body = textwrap.indent("\n".join([*step.lines, f"return {step.out}"]), "    ")
                exec(f"def tried():\n{body}", names)
                value = names["tried"]()
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return None
        if [t._version for t in self.values.values()] != before:
            return None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        fits = 0 < value.numel() <= MOST_CELLS and value.dim() <= MOST_DIMS
        return value if fits and value.requires_grad else None
