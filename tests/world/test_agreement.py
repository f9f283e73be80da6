"""Settings that ranks must share are compared during the rendezvous."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time

import pytest
import torch.distributed as dist

import gpudist
from gpudist.errors import CollectiveTimeout, GpudistError, PeerFailure, PlanMismatch
from gpudist.transport.failure.asker import StoreAsker
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world import runtime
from gpudist.world.agreement import WorldAgreement
from gpudist.world.launch import Launch
from gpudist.world.runtime import connect
from tests import warm
from tests.patience import allowed_s

needs_core = pytest.mark.skipif(not is_built(), reason="" if is_built() else what_is_missing())


def agreements(store: dist.Store, *said: str) -> list[WorldAgreement]:
    """Return the agreements of ranks that join through one store and declare ``said``."""
    ask = StoreAsker("connect", 0, 20.0, None)
    found = [WorldAgreement(ask, store, "world", rank, len(said)) for rank in range(len(said))]
    for mine, text in zip(found, said, strict=True):
        mine.say(text)
    return found


def test_what_is_alike() -> None:
    store = dist.HashStore()
    for mine in agreements(store, "0.1.0", "0.1.0"):
        mine.compare(store)


def test_what_differs_is_shown_side_by_side() -> None:
    store, texts = dist.HashStore(), []
    for mine in agreements(store, "gpudist 0.1.0", "gpudist 0.2.0", "gpudist 0.1.0"):
        with pytest.raises(PlanMismatch) as caught:
            mine.compare(store)
        texts.append(str(caught.value))
    assert set(texts) == {
        "ranks disagree about what they run:\n"
        "  rank 0: gpudist 0.1.0\n  rank 1: gpudist 0.2.0\n  rank 2: gpudist 0.1.0\n"
        "install the same gpudist on every node, and start every rank with the same variables and "
        "arguments of init()"
    }


@pytest.mark.parametrize(("theirs", "kind"), [("0.2.0", PlanMismatch), ("", CollectiveTimeout)])
def test_a_rank_that_cannot_connect_looks_for_what_differs(
    theirs: str, kind: type[Exception]
) -> None:
    """Versions may declare settings differently, so that the ranks never join."""
    store = dist.HashStore()
    if theirs:
        store.set("world/said/1", theirs)
        store.add("world/said/all", 1)
    with pytest.raises(kind):
        connect("gloo", store, 0, 2, 0.3, "world")


def raised_by_both(transports: tuple[str, str], deterministic: tuple[bool, bool]) -> list[str]:
    """Return the errors of two ranks that join one store with different settings."""
    store = dist.HashStore()
    texts = [""] * 2

    def start(rank: int) -> None:
        launch = Launch("torchrun", rank, 2, 2, rank)
        try:
            runtime._connect_all(transports[rank], store, launch, 20.0, None, deterministic[rank])
        except GpudistError as error:
            texts[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def test_ranks_must_all_be_deterministic() -> None:
    for text in raised_by_both(("gloo", "gloo"), (False, True)):
        assert text.startswith("PlanMismatch: ranks disagree about what they run:")
        version = gpudist.__version__
        assert f"rank 0: gpudist {version} over gloo\n" in text
        assert f"rank 1: gpudist {version} over gloo, deterministic\n" in text


@needs_core
def test_ranks_that_wait_over_different_transports_learn_of_it_long_before_the_deadline() -> None:
    start_s = time.monotonic()
    texts = raised_by_both(("gloo", "host"), (False, False))
    assert time.monotonic() - start_s < allowed_s(5.0)
    for text in texts:
        assert text.startswith("PlanMismatch: ranks disagree about what they run:")
        assert f"rank 1: gpudist {gpudist.__version__} over host\n" in text


JOINS = """
import gpudist
try:
    gpudist.init(timeout=20.0, deterministic={rank} == 1)
except gpudist.errors.PlanMismatch as error:
    print("rank 1: gpudist {version} over gloo, deterministic" in str(error))
"""


def test_processes_are_told_where_one_of_them_serves_the_store() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    programs = []
    for rank in range(2):
        known = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GPUDIST_TRANSPORT": "gloo"}
        environment = {**os.environ, **{name: str(value) for name, value in known.items()}}
        text = JOINS.format(rank=rank, version=gpudist.__version__)
        programs.append(
            subprocess.Popen(
                [warm.python(), "-c", text], env=environment, text=True, stdout=subprocess.PIPE
            )
        )
    said = [program.communicate(timeout=60)[0] for program in programs]
    assert said == ["True\n"] * 2


class StoppedStore(dist.Store):
    """One whose host is stopped: no question is answered while the test lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.answers.wait()


def test_a_store_that_does_not_answer_ends_at_the_deadline() -> None:
    store = StoppedStore()
    start_s = time.monotonic()
    try:
        with pytest.raises(CollectiveTimeout, match="its host, rank 1, is stopped or cannot be"):
            connect("gloo", store, 0, 2, 0.3, "world", store_rank=1)
    finally:
        store.answers.set()
    assert 0.3 <= time.monotonic() - start_s < allowed_s(2.0)


class LostStore(dist.Store):
    """One whose host has ended."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_names_its_host() -> None:
    with pytest.raises(PeerFailure, match="the store of this world is gone: rank 1") as caught:
        connect("gloo", LostStore(), 0, 2, 20.0, "world", store_rank=1)
    assert caught.value.rank == 1


def test_one_that_has_joined_looks_no_more() -> None:
    mine, _ = agreements(dist.HashStore(), "gpudist 0.1.0", "gpudist 0.2.0")
    mine.close()
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        mine.look()
        time.sleep(0.05)


def test_one_that_waits_looks_by_itself() -> None:
    mine, _ = agreements(dist.HashStore(), "gpudist 0.1.0", "gpudist 0.2.0")
    deadline_s = time.monotonic() + 5.0
    with pytest.raises(PlanMismatch, match=r"rank 1: gpudist 0\.2\.0"):
        while time.monotonic() < deadline_s:
            mine.look()
            time.sleep(0.05)
