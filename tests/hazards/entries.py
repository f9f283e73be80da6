"""Entries: a module, its inputs by letters, and the grids to try it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)
Grid = tuple[int, ...]
TOLERANCE = 1e-9

SIZES = {
    "B": 2, "C": 4, "E": 6,  # batch, channels, size of an embedding
    "Z": 6, "H": 12, "W": 10,  # images and volumes
    "L": 14, "T": 9, "D": 8,  # signals; tokens and their features
}  # fmt: skip
_SPATIAL = "ZHWLT"


@dataclass(frozen=True)
class Input:
    """One argument of a forward.

    Attributes:
        name: name of the argument.
        letters: one letter per dim; a digit is a fixed size.
        whole: whether every worker gets the whole tensor, not a block.
        kind: ``"float"``, ``"int"`` below ``high``, or ``"bool"``.
        keyword: whether it is passed by name.
        leaf: whether it requires grad; floats do unless specified otherwise.
    """

    name: str
    letters: tuple[str, ...]
    whole: bool = False
    kind: str = "float"
    high: int = 4
    keyword: bool = False
    leaf: bool = True

    @classmethod
    def read(cls, text: str, keyword: bool) -> Input:
        """Read ``"name: B C H W"``; words are ``whole``, ``int``, ``bool`` and ``const``."""
        name, _, rest = text.partition(":")
        words = rest.split()
        letters = tuple(word for word in words if word in SIZES or word.isdigit())
        kind = next((word for word in words if word in ("int", "bool")), "float")
        leaf = kind == "float" and "const" not in words
        return cls(name, letters, "whole" in words, kind, keyword=keyword, leaf=leaf)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(int(w) if w.isdigit() else sizes[w] for w in self.letters)

    def draw(self, sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
        shape = self.shape(sizes)
        if self.kind == "int":
            return torch.randint(0, self.high, shape, generator=generator)
        if self.kind == "bool":
            return torch.rand(shape, generator=generator) < 0.6
        return torch.randn(shape, dtype=torch.float64, generator=generator)


def unchanged(network: nn.Module) -> nn.Module:
    return network


@dataclass(frozen=True)
class Entry:
    """A module to judge.

    Attributes:
        name: of the class.
        make: the module, initialised by torch's generator.
        inputs: the arguments of its forward.
        sizes: of the letters.
        step: cells by which spatial dims grow between the two sizes; 0: a module of one size.
        grids: process grids, cheapest first; by default drawn from the letters of the first block.
        may_refuse: why a clear refusal is right too; empty: it must compute.
        random: draws numbers, so that the reference is the converted network on one worker.
        processes: keeps state of the process, so that ranks cannot be threads.
        after: what is done to the network, converted or not, before it is called.
        modes: ``"train"``, ``"eval"``.
        tolerance: of numbers in float64, more only where the forward computes with fewer bits.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    sizes: Mapping[str, int]
    step: int = 1
    grids: tuple[Grid, ...] = ()
    may_refuse: str = ""
    random: bool = False
    processes: bool = False
    after: Callable[[nn.Module], nn.Module] = unchanged
    modes: tuple[str, ...] = ("train", "eval")
    tolerance: float = TOLERANCE

    @property
    def allowed(self) -> tuple[str, ...]:
        """Verdicts that are no mistake."""
        return ("right", "refused") if self.may_refuse else ("right",)

    def blocks(self) -> list[Input]:
        return [each for each in self.inputs if not each.whole]

    def sizes_of(self, second: bool) -> dict[str, int]:
        grown = {name: self.step for name in _SPATIAL} | {"B": 1 if self.step else 0}
        return {n: size + grown.get(n, 0) * second for n, size in self.sizes.items()}

    def draw(self, second: bool, seed: int) -> dict[str, torch.Tensor]:
        """Return the whole inputs, by name."""
        generator = torch.Generator().manual_seed(seed)
        sizes = self.sizes_of(second)
        return {each.name: each.draw(sizes, generator) for each in self.inputs}

    def all_grids(self) -> tuple[Grid, ...]:
        return self.grids or grids_of(self.blocks()[0].letters)


def grids_of(letters: Sequence[str]) -> tuple[Grid, ...]:
    """Grids for a tensor with these dims: 2 to 6 workers over its spatial dims and the batch."""
    spatial = [d for d, letter in enumerate(letters) if letter in _SPATIAL]
    batch = [d for d, letter in enumerate(letters) if letter == "B"]
    cuts: list[dict[int, int]] = []
    if spatial:
        first, last = spatial[0], spatial[-1]
        cuts += [{first: 2}, {last: 3}, {first: 4}, {last: 2}, {first: 3}]
    if len(spatial) > 1:
        cuts[1:1] = [{spatial[-2]: 2, spatial[-1]: 2}]
        cuts += [{first: 2, last: 3}, {first: 3, last: 2}]
    if batch:
        cuts += [{batch[0]: 2}]
        cuts[2:2] = [{batch[0]: 2, spatial[0]: 2}] if spatial else []
    return tuple(tuple(cut.get(d, 1) for d in range(len(letters))) for cut in cuts)


ENTRIES: dict[str, Entry] = {}


def forward(*inputs: str, **options: Any) -> Callable[[type[_Module]], type[_Module]]:
    """Enter a module class; inputs as ``Input.read`` takes them, after ``"*"`` by keyword.

    Capital letters among the options are sizes, the others fields of ``Entry``.
    """
    star = inputs.index("*") if "*" in inputs else len(inputs)
    read = tuple(Input.read(text, i > star) for i, text in enumerate(inputs) if text != "*")
    sizes = SIZES | {name: options.pop(name) for name in list(options) if name in SIZES}

    def enter(made: type[_Module]) -> type[_Module]:
        name = made.__name__
        if name in ENTRIES:
            raise ValueError(f"{name} is entered twice")
        ENTRIES[name] = Entry(name, made, read, sizes, **options)
        return made

    return enter


def workers(grid: Grid) -> int:
    return prod(grid)
