"""Bounded cache of objects, used wherever a cache is not one of a function's results."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")

# Items are rarely added, and threads of one process may share a cache.
_adding = RLock()


class Cache(dict[Key, Made]):
    """Dict of at most ``limit`` items that drops the oldest item to add another.

    A look-up costs as much as in a dict, which matters in calls of a few microseconds. Ranks that
    add the same keys in the same order drop the same keys. Setting a key again makes it the newest.

    Args:
        limit: maximum number of items. A layer sees few shapes: full batches, the last one, perhaps
            one for evaluation.
    """

    def __init__(self, limit: int = 256) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: Key, value: Made) -> None:
        with _adding:
            self.pop(key, None)
            while len(self) >= self.limit:
                del self[next(iter(self))]
            super().__setitem__(key, value)

    def get_or_make(self, key: Key, make: Callable[[], Made]) -> Made:
        """Return the item of ``key``; create it at the first call."""
        item = self.get(key)
        if item is None:
            item = self[key] = make()
        return item


def cache_of(owner: dict[Any, Any], name: object, limit: int = 256) -> Cache[Any, Any]:
    """Return the cache ``owner[name]``; create it at the first call."""
    cache = owner.get(name)
    if cache is None:
        cache = owner.setdefault(name, Cache(limit))
    return cache
