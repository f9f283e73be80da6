"""Ranks on one node, the address at which others reach a rank, and a store that is silent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gpudist.transport.addresses import (
    LOOPBACK,
    address_towards,
    host_of,
    is_loopback,
    reachable_address,
)
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.store import StoreFailureChannel
from gpudist.transport.host.beacon import Beacon, is_beside
from tests.patience import allowed_s


@pytest.fixture
def beacon() -> Iterator[Beacon]:
    lit = Beacon()
    yield lit
    lit.close()


def test_a_beacon_is_seen_until_it_is_put_out(beacon: Beacon) -> None:
    assert is_beside(beacon.text)
    beacon.close()
    assert not is_beside(beacon.text)


def test_another_process_of_the_same_number_is_not_beside(beacon: Beacon) -> None:
    pid, descriptor, token = beacon.text.split()
    assert not is_beside(f"{pid} {descriptor} {'0' * len(token)}")
    reader, writer = os.pipe()
    try:
        # Reading a pipe would wait for ever, and take what is somebody else's.
        assert not is_beside(f"{pid} {reader} {token}")
    finally:
        os.close(reader)
        os.close(writer)
    assert not is_beside(f"{2**22 + 1} {descriptor} {token}")


def test_addresses() -> None:
    assert address_towards("localhost") == LOOPBACK
    assert is_loopback("127.0.1.1") and is_loopback("::1") and not is_loopback("10.0.0.1")
    assert not is_loopback("fe80::1%eth0")


def test_the_rank_beside_the_store_takes_an_address_that_leads_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "gpudist.transport.addresses.address_towards", lambda host: f"the way to {host}"
    )
    others = ["127.0.1.1", "10.0.0.2", "10.0.0.3"]
    assert reachable_address("127.0.1.1", others) == "the way to 10.0.0.2"
    assert reachable_address("10.0.0.1", others) == "10.0.0.1"
    assert reachable_address("127.0.0.1", others[:1]) == "127.0.0.1"


def test_where_a_store_is() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert host_of(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"
    assert host_of(dist.HashStore()) == LOOPBACK


class CutOff(dist.HashStore):
    """Channel that does not answer until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.answers.wait()
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return super().check(keys)


def test_a_silent_store_is_waited_for_once() -> None:
    store = CutOff()
    channel = StoreFailureChannel(store, "world")
    start_s = time.monotonic()
    assert channel.peek() is None
    assert channel.hangs
    channel.publish_lines(0, ["a line"])
    assert channel.collect_lines(3) == [None] * 3
    channel.post(Failure("CollectiveTimeout", 0, "late"))
    channel.leave(0)
    assert time.monotonic() - start_s < allowed_s(1.0)
    store.answers.set()
    deadline_s = time.monotonic() + 10
    while channel.peek() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not channel.hangs
    assert channel.peek() == Failure("CollectiveTimeout", 0, "late")
    channel.close()
