"""Random configurations of every layer: how each ends, its outputs, its state and its messages."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from gpudist.errors import GpudistError
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.frozen.movements import digest, sent
from tests.fuzz.case import Case, from_json, to_json
from tests.fuzz.families import by_layer

RANKS = (2, 3, 4)
_calls = threading.local()


def record(count: int, folder: Path, is_first: bool) -> dict[str, Any]:
    """Carry out drawn configurations, or those that the other checkout drew."""
    if is_first:
        texts = [_drawn(number) for number in range(count)]
    else:
        texts = [key for key in json.loads((folder / "layers.json").read_text()) if key != "count"]
    handle = register_module_forward_hook(_watch)
    try:
        return {text: _carried_out(text) for text in texts}
    finally:
        handle.remove()


def _drawn(number: int) -> str:
    rng = random.Random(f"frozen {number}")
    layers = list(by_layer())
    layer, ranks = layers[number % len(layers)], rng.choice(RANKS)
    return to_json(by_layer()[layer].draw(rng, layer, ranks), ranks=ranks)


def _carried_out(text: str) -> list[Any]:
    case, more = from_json(text)
    return run_distributed(_of_rank, more["ranks"], case, timeout=30)


def _of_rank(P_world: Partition, case: Case) -> list[Any]:
    torch.manual_seed(case.seed)
    seen = _calls.seen = []
    before = sent(P_world)
    how = "right"
    try:
        by_layer()[case.layer].check(case, P_world)
    except GpudistError as error:
        how = f"{type(error).__name__}: {error}"
    return [how, seen, [a - b for a, b in zip(sent(P_world), before, strict=True)]]


def are_alike(before: Any, now: Any) -> bool:
    """Whether all ranks end alike, up to the texts of errors."""
    return [_without_text(each) for each in before] == [_without_text(each) for each in now]


def _without_text(end: list[Any]) -> list[Any]:
    how, *rest = end
    return [how.partition(":")[0], *rest]


def _watch(module: torch.nn.Module, args: Any, outputs: Any) -> None:
    if type(module).__module__.startswith("gpudist."):
        tensors = [y for y in tree_leaves(outputs) if isinstance(y, torch.Tensor)]
        names = list(module.state_dict())
        _calls.seen.append([type(module).__name__, names, [digest(y) for y in tensors]])
