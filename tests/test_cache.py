"""Cache: a dict of the newest items."""

from __future__ import annotations

import copy
import random
from threading import Thread

from gpudist.cache import Cache, cache_of


def test_drops_the_oldest() -> None:
    cache = Cache[int, str](3)
    for key in range(5):
        cache[key] = str(key)
    assert list(cache.items()) == [(2, "2"), (3, "3"), (4, "4")]
    cache[2] = "again"
    cache[5] = "5"
    assert list(cache) == [4, 2, 5]


def test_makes_an_item_once() -> None:
    calls: list[int] = []
    cache = Cache[int, int](2)
    for key in (1, 2, 1, 2, 3, 1):
        assert cache.get_or_make(key, lambda key=key: calls.append(key) or key * 10) == key * 10
    assert calls == [1, 2, 3, 1]


def test_copies_are_caches_of_their_own() -> None:
    cache = Cache[int, list[int]](2)
    cache[1] = [1]
    other = copy.deepcopy(cache)
    other[2], other[3] = [2], [3]
    assert (list(cache), list(other), other.limit) == ([1], [2, 3], 2)


def test_threads_share_one() -> None:
    cache = Cache[int, int](16)

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(5000):
            key = chosen.randrange(40)
            assert cache.get_or_make(key, lambda key=key: -key) == -key

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == 16


def test_owner_has_one_of_a_name() -> None:
    owner: dict[str, object] = {}
    assert cache_of(owner, "a", 8) is cache_of(owner, "a", 9)
    assert cache_of(owner, "a").limit == 8
