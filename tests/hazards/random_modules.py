"""Random modules: programs drawn from the vocabulary, with an input and a grid, by a seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from tests.hazards.entries import Entry, Grid, Input
from tests.hazards.idioms import IDIOMS
from tests.hazards.judge import Record, Verdict, in_float64, judge, records
from tests.hazards.programs import Drawing, Program
from tests.hazards.subjects import Alone, Converted, Subject, Values, leaf
from tests.hazards.vocabulary import WORDS

WORKERS = (2, 3, 4, 4, 6)
# Programs whose results depend mainly on rounding are left out.
_NOISE, _STEADY, _LARGEST = 1e-13, 1e-10, 1e6
_TRIES = 60
_MOST_SHRINKING = 40
_SHARE_OF_IDIOMS = 0.6
_RETURNED = (
    *("OUTPUTS", "[OUTPUTS]", "{'out': [OUTPUTS], 'size': v0.shape, 'none': None}"),
    *("Features(v0.mean(), (OUTPUTS,), len(v0))", "((OUTPUTS,), v0.shape[-1])"),
)


@dataclass(frozen=True)
class Case:
    """A random module with everything that is needed to judge it."""

    name: str
    program: Program
    shape: tuple[int, ...]
    grid: Grid

    def entry(self) -> Entry:
        given = Input("v0", tuple(str(n) for n in self.shape))
        return Entry(self.name, self.program.module, (given,), {}, step=0)

    def judge(self, subject: type[Subject] = Converted) -> Verdict:
        return judge(self.entry(), self.grid, subject)

    def __str__(self) -> str:
        return f"x of {list(self.shape)} on a grid of {list(self.grid)}\n{self.program.source()}"


def draw(seed: int, number: int, idioms: int = 0) -> Case:
    """Return the case with this number, which depends only on the other arguments.

    Args:
        seed: seed of all cases.
        number: number of the case.
        idioms: least number of idioms of hand-written forwards among the operations.
    """
    for attempt in range(_TRIES):
        rng = random.Random(f"{seed}:{number}:{attempt}" + f":{idioms}" * bool(idioms))
        with torch.random.fork_rng():
            torch.manual_seed(rng.randrange(1 << 30) if idioms else 0)
            case = _drawn(f"{seed}:{number}", rng, idioms)
        if case is not None and is_steady(case):
            return case
    raise AssertionError(f"random module {seed}:{number}: no valid one in {_TRIES} tries")


def _drawn(name: str, rng: random.Random, idioms: int) -> Case | None:
    spatial = rng.choice((1, 2, 2, 2, 3))
    most = {1: 15, 2: 11, 3: 6}[spatial]
    extents = [rng.randint(3, most) for _ in range(spatial)]
    shape = (rng.randint(1, 3), rng.randint(1, 4), *extents)
    operations = [operation for operation, _ in WORDS]
    weights = [weight for _, weight in WORDS]
    # Idioms may read values.
    drawing = Drawing(shape, rng, "cpu" if idioms else "meta")
    wanted = rng.randint(4, 12)
    found = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(20 * wanted):
            if len(drawing.steps) == wanted:
                break
            is_idiom = idioms > 0 and rng.random() < _SHARE_OF_IDIOMS
            words = rng.choice(IDIOMS) if is_idiom else rng.choices(operations, weights)[0]
            found += drawing.extend(words) and is_idiom
    if len(drawing.steps) < wanted or found < idioms:
        return None
    program = Program(tuple(drawing.steps), rng.choice(_RETURNED) if idioms else "OUTPUTS")
    return Case(name, program, shape, _grid(len(shape), rng))


def _grid(dims: int, rng: random.Random) -> Grid:
    """Spatial dims mostly, the batch at times, channels rarely."""
    count = rng.choice(WORKERS)
    parts = rng.choice({4: [[4], [2, 2]], 6: [[6], [2, 3], [3, 2]]}.get(count, [[count]]))
    open_dims = list(range(2, dims)) + [0] * (rng.random() < 0.4) + [1] * (rng.random() < 0.1)
    if len(open_dims) < len(parts):
        open_dims.append(0)
    chosen = rng.sample(open_dims, len(parts))
    grid = [1] * dims
    for d, part in zip(chosen, parts, strict=True):
        grid[d] = part
    assert prod(grid) == count
    return tuple(grid)


class _Shaken(Alone):
    """The network alone, on an input and with parameters that rounding might have changed."""

    def leaves(self, values: Values, with_graph: bool) -> Values:
        generator = torch.Generator().manual_seed(5)

        def noise(t: torch.Tensor) -> torch.Tensor:
            return _NOISE * torch.randn(t.shape, generator=generator, dtype=t.dtype)

        with torch.no_grad():
            for p in self.network.parameters():
                p.add_(noise(p))
        return {n: leaf(x + noise(x), with_graph) for n, x in values.items()}


def is_steady(case: Case) -> bool:
    """Return whether the module runs alone, with moderate numbers that noise hardly changes."""
    entry = case.entry()
    try:
        with in_float64():
            expected = records(entry, Alone(entry, None))
            shaken = records(entry, _Shaken(entry, None))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    pairs = list(zip(expected, shaken, strict=True))
    return all(list(a.outputs) == list(b.outputs) and _near(a, b) for a, b in pairs)


def _near(expected: Record, found: Record) -> bool:
    for group in _groups(expected, found):
        largest = max((float(a.abs().max()) for a, _ in group if a.numel()), default=0.0)
        if not 0 <= largest <= _LARGEST:
            return False
        for a, b in group:
            if a.shape != b.shape or not bool(((a - b).abs() <= _STEADY * (largest + 1e-3)).all()):
                return False
    return True


def _groups(a: Record, b: Record) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    for path, y in a.outputs.items():
        if isinstance(y, torch.Tensor):
            yield [(y, b.outputs[path])]
    for name in a.groups:
        yield [(t, b.groups[name][key]) for key, t in a.groups[name].items()]


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the shortest case that still fails."""
    tries, number = 0, len(case.program.steps) - 1
    while number >= 0 and tries < _MOST_SHRINKING:
        smaller = case.program.without(number) if number < len(case.program.steps) else None
        number -= 1
        if smaller is None:
            continue
        tries += 1
        candidate = replace(case, program=smaller)
        if is_steady(candidate) and fails(candidate):
            case, number = candidate, len(smaller.steps) - 1
    return case
