"""Classes that take DistDL's arguments, over layers of gpudist."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from gpudist.compat.distdl.partition import MPIPartition


class MPIBufferManager:
    """Argument ``buffer_manager`` of DistDL's layers; gpudist manages its buffers itself."""


def adapt(name: str, arguments: Callable[..., None], *bases: type[Any]) -> Any:
    """Return a class whose constructor takes DistDL's arguments and partitions.

    The layer among ``bases`` gets the arguments by name, gpudist's partitions, and
    ``shape="dynamic"``: blocks of the input may change at every call.

    Args:
        name: name of the class.
        arguments: function of DistDL's arguments, with the documentation of the class.
        bases: classes that the class derives from; the last one is the layer.
    """
    signature = inspect.signature(arguments)

    @wraps(arguments)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        _, *rest = call.arguments.items()
        values = {key: x.partition if isinstance(x, MPIPartition) else x for key, x in rest}
        values.pop("buffer_manager", None)
        super(kind, self).__init__(**values, shape="dynamic")

    kind = make(name, *bases, __init__=init, __doc__=arguments.__doc__)
    return kind


def make(name: str, *bases: type[Any], **entries: Any) -> Any:
    """Return a class of ``distdl.nn``, with the documentation of its first base by default."""
    entries = {"__doc__": bases[0].__doc__, "__module__": "gpudist.compat.distdl.nn", **entries}
    return type(name, bases, entries)
