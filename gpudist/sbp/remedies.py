"""Remedies that errors name for functions without a rule for global tensors."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.sbp.call import Call, Spec, as_call
from gpudist.sbp.methods import METADATA, METHODS
from gpudist.sbp.registry import name_of, signatures

_ROOMS = (torch.Tensor, torch, torch.nn.functional, torch.special, torch.linalg)
_REGISTER = "register a rule with gpudist.sbp.registry.register"


def remedy_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what to do instead of ``function``, outside of converted networks."""
    name = getattr(function, "__name__", "")
    if name.startswith("_fused_"):
        return "pass foreach=True to the optimizer in place of fused=True"
    changes_in_place = name.endswith("_") and not name.endswith("__")
    twin = _twin(function, name.removesuffix("_") if changes_in_place else name)
    if twin is not None:
        value = f"{name_of(twin)} has them"
        return (
            f"{value}: use x.copy_(...) of its result" if changes_in_place else f"{value}: use it"
        )
    if changes_in_place:
        return (
            "change the whole tensor, whole = x.full_tensor(), and use x.copy_(gpudist.to_global("
            "whole, x.placement, gpudist.sbp.broadcast))"
        )
    whole = "compute it on the whole tensor, x.full_tensor(), which is gathered on each rank"
    return f"{whole}, or {_REGISTER}" if can_have_rule(function, args, kwargs) else whole


def _twin(function: Any, name: str) -> Any:
    # Modules of torch have functions of the same name, such as torch.nn.functional.embedding.
    candidates = (getattr(room, name, None) for room in _ROOMS)
    known = (signatures, METHODS, METADATA)
    return next((f for f in candidates if f is not function and any(f in k for k in known)), None)


def can_have_rule(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the shapes of the results follow from those of the arguments."""
    slots, named, tensors = as_call(function, args, kwargs)
    specs = tuple(Spec(tuple(x.shape), x.dtype) for x in tensors)
    try:
        return bool(Call(function, slots, named, specs).outputs)
    except Exception:
        return False
