"""Every public name with its arguments."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

MODULES = (
    "gpudist", "gpudist.nn", "gpudist.ops", "gpudist.sbp", "gpudist.checkpoint", "gpudist.data",
    "gpudist.planning", "gpudist.profiling", "gpudist.pictures", "gpudist.testing", "gpudist.amp",
    "gpudist.batch", "gpudist.errors",
)  # fmt: skip


def record(count: int, folder: Path, is_first: bool) -> dict[str, Any]:
    return {
        f"{name}.{public}": _arguments(getattr(module, public))
        for name in MODULES
        for module in [importlib.import_module(name)]
        for public in getattr(module, "__all__", None) or _own(module)
    }


def _own(module: Any) -> list[str]:
    return [
        name
        for name, each in vars(module).items()
        if not name.startswith("_") and getattr(each, "__module__", None) == module.__name__
    ]


def _arguments(each: Any) -> Any:
    """Names of arguments with defaults; ``None`` of what is not called."""
    if not callable(each):
        return None
    try:
        signature = inspect.signature(each)
    except (TypeError, ValueError):
        return None
    return [
        f"{'*' * (one.kind in (2, 4))}{'*' * (one.kind == 4)}{one.name}"
        + ("" if one.default is inspect.Parameter.empty else f"={one.default!r}".split(" at 0x")[0])
        for one in signature.parameters.values()
    ]


# Arguments renamed on purpose: programs get partitions from gpudist.init(), not by a constructor.
RENAMED = {"wire": "transport"}


def accepts(before: Any, now: Any) -> bool:
    """Whether every call that was accepted still is, up to ``RENAMED``."""
    if before is None or now is None:
        return before == now
    now = [each if each in before else RENAMED.get(each, each) for each in now]
    names = [each.partition("=")[0] for each in before if not each.startswith("*")]
    left = [each.partition("=")[0] for each in now]
    takes_any = any(each.startswith("**") for each in now)
    kept = [name for name in left if name in names]
    added = [each for each in now if each.partition("=")[0] not in names]
    needed = [each for each in added if "=" not in each and not each.startswith("*")]
    had_any = any(each.startswith("*") for each in before)
    return (kept == names or takes_any) and (not needed or had_any)
