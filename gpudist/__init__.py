"""gpudist: model parallelism for PyTorch, built on data movements with exact adjoints."""

from __future__ import annotations

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from gpudist.version import __version__ as __version__

# Torch takes seconds to load: rooms and names are imported when one is first used.
if TYPE_CHECKING:
    from gpudist import (
        checkpoint as checkpoint,
        convert as convert,
        errors as errors,
        pictures as pictures,
        planning as planning,
        profiling as profiling,
        testing as testing,
    )
    from gpudist._names import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name != "__all__":
            if name.startswith("__"):
                raise AttributeError(f"module 'gpudist' has no attribute {name!r}")
            if name.isidentifier() and _find_spec(f"gpudist.{name}") is not None:
                return _import_module(f"gpudist.{name}")
        if name == "draw":
            globals()[name] = _import_module("gpudist.pictures").draw
        else:
            names = _import_module("gpudist._names")
            loaded = {"__all__", *names.__all__} - {"draw"}
            globals().update({each: getattr(names, each) for each in loaded})
        if name in globals():
            return globals()[name]
        raise _import_module("gpudist.checks.hints").MissingName("gpudist", name)

    def __dir__() -> list[str]:
        return sorted([*__getattr__("__all__"), "checkpoint", "planning", "testing", "__version__"])
