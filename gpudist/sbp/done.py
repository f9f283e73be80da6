"""List the functions that a converted network calls, as parts that are equal on all workers."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gpudist.cache import Cache
from gpudist.checks.digest import digest_of
from gpudist.sbp.global_spec import GlobalSpec
from gpudist.sbp.registry import name_of
from gpudist.sbp.trees import map_tree

# Types whose values are equal on all workers.
_VALUES = (int, float, complex, str, torch.dtype, GlobalSpec)
# Texts of calls by their digests, for errors.
_texts = Cache[bytes, str](4096)


class _Done(threading.local):
    """Record of the network that this thread is running.

    Attributes:
        parts: digests of the functions that the forward has called, and floats that these do not
            contain; ``None`` while no network runs, or within such a function.
        is_off: whether workers may do different things, as in a capture that one may refuse.
    """

    parts: list[bytes] | None = None
    is_off: bool = False


done = _Done()


def part_of(call: tuple[Any, ...]) -> bytes:
    """Return the digest of a call, or of its key, which is equal on all workers that make it."""
    text = repr(map_tree(call, _fact))
    part = digest_of(text.encode())
    _texts[part] = text
    return part


def text_of_part(part: bytes) -> str:
    """Describe a part of what a network was given or did."""
    return _texts.get(part) or part.decode(errors="replace")


def _fact(x: Any) -> Any:
    x = getattr(x, "_global_spec", x)
    if isinstance(x, torch.Tensor):
        return list(x.shape), x.dtype
    # Workers may have devices of their own.
    is_device = isinstance(x, str) and ":" in x
    if isinstance(x, _VALUES) and not is_device:
        return x
    return name_of(x) if callable(x) else type(x).__name__
