"""The public surface: names, signatures, bases and methods, and what layers print and store.

``python -m tests.surface`` writes ``tests/surface.txt``; commit it where a change of the surface is
meant. Annotations are left out: pyright checks types.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.nn import Module

import gpudist
from gpudist import nn
from gpudist.nn.layer_table import LAYERS
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

FILE = Path(__file__).with_suffix(".txt")
ROOMS: list[Any] = [
    gpudist, nn, gpudist.ops, gpudist.sbp, gpudist.amp, gpudist.data, gpudist.checkpoint,
    gpudist.planning, gpudist.testing,
]  # fmt: skip


def surface() -> Iterator[str]:
    """Yield the lines of all rooms and of layers."""
    for room in ROOMS:
        for name in sorted(room.__all__):
            yield from _lines_of(f"{room.__name__}.{name}", getattr(room, name))
    yield from run_distributed(_layers, 1)[0]


def _home(value: Any) -> str:
    return getattr(value, "__module__", None) or ""


def _lines_of(place: str, value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType) or not _home(value).startswith("gpudist"):
        yield f"{place}: {type(value).__name__}"
    elif not inspect.isclass(value):
        yield f"{place}{_signature(value) if callable(value) else f': {type(value).__name__}'}"
    else:
        bases = [base.__name__ for base in value.__mro__[1:-1] if _is_public(base)]
        yield f"{place}{_signature(value)} <- {', '.join(bases)}"
        ours = [kind for kind in value.__mro__ if _home(kind).startswith("gpudist")]
        for name in sorted({name for kind in ours for name in vars(kind)}):
            member = inspect.getattr_static(value, name)
            plain = inspect.unwrap(getattr(member, "__func__", member))
            # The other methods of a layer are there for the layers that derive from it.
            if name.startswith("_") or (issubclass(value, Module) and name != "forward"):
                continue
            yield f"{place}.{name}{_signature(plain) if inspect.isfunction(plain) else ''}"


def _is_public(kind: type) -> bool:
    places = [*ROOMS, gpudist.errors]
    return not _home(kind).startswith("gpudist") or any(
        vars(place).get(kind.__name__) is kind for place in places
    )


def _signature(function: Any) -> str:
    # Names, kinds and defaults of parameters.
    try:
        found = inspect.signature(function)
    except ValueError:
        return "(...)"
    bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=found.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _layers(P_world: Partition) -> list[str]:
    lines: list[str] = []
    for row in LAYERS:
        layer = row.make(P_world.grid(*[1] * len(row.inputs[0].shape)))
        stored = ", ".join(f"{key} {list(x.shape)}" for key, x in layer.state_dict().items())
        lines.append(f"{' '.join(repr(layer).split())} stores {stored or 'nothing'}")
    return sorted(lines)


if __name__ == "__main__":
    FILE.write_text("\n".join(surface()) + "\n", encoding="utf-8")
