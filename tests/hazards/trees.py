"""Leaves of an output by path: tensors, numbers and everything else."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf of ``value`` by its path, which includes the containers' kinds.

    A generator is run to its end.
    """
    if isinstance(value, types.GeneratorType):
        return leaves(list(value), path + "~")
    if isinstance(value, torch.Size):
        return {path: tuple(int(n) for n in value)}
    if isinstance(value, dict):
        pairs, kind = [(repr(k), v) for k, v in value.items()], "{}"
    elif isinstance(value, tuple | list):
        kind = "()" if isinstance(value, tuple) else "[]"
        names = getattr(value, "_fields", range(len(value)))
        pairs = [(str(name), item) for name, item in zip(names, value, strict=True)]
    elif is_dataclass(value) and not isinstance(value, type):
        pairs, kind = [(f.name, getattr(value, f.name)) for f in fields(value)], "."
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for name, item in pairs:
        found |= leaves(item, f"{path}{kind[0]}{name}{kind[1:]}")
    return found or {path + kind: len(pairs)}
