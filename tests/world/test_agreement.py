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
from gpudist.errors import (
    CollectiveTimeout,
    GpudistError,
    PeerFailure,
    PlanMismatch,
    TransportError,
)
from gpudist.transport.failure.asker import StoreAsker
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world import runtime
from gpudist.world.agreement import Outsider, WorldAgreement
from gpudist.world.launch import Launch
from gpudist.world.runtime import connect
from tests import warm
from tests.doubles import use_doubles
from tests.patience import allowed_s

needs_core = pytest.mark.skipif(not is_built(), reason="" if is_built() else what_is_missing())


def agreement(store: dist.Store, rank: int, size: int = 3) -> WorldAgreement:
    return WorldAgreement(StoreAsker("connect", rank, 20.0, None), store, "world", rank, size)


def said(arrivals: list[tuple[int, int, str]], store: dist.Store | None = None) -> list[str]:
    """Let processes arrive one after another, each with its rank, size and text.

    Returns:
        What each is told once all have arrived: "" or its error.
    """
    store, texts = store or dist.HashStore(), [""] * len(arrivals)
    agreements = [agreement(store, rank, size) for rank, size, _ in arrivals]
    for number, mine in enumerate(agreements):
        try:
            mine.say(arrivals[number][2])
        except GpudistError as error:
            texts[number] = f"{type(error).__name__}: {error}"
    for number, mine in enumerate(agreements):
        try:
            mine.compare(store)
        except GpudistError as error:
            texts[number] = texts[number] or f"{type(error).__name__}: {error}"
        mine.close()
    return texts


def test_what_is_alike() -> None:
    store = dist.HashStore()
    assert said([(0, 2, "0.1.0"), (1, 2, "0.1.0")], store) == ["", ""]
    agreement(store, 0, 2).complete()
    agreement(store, 1, 2).complete()


def test_what_differs_is_shown_side_by_side() -> None:
    texts = said([(0, 3, "gpudist 0.1.0"), (1, 3, "gpudist 0.2.0"), (2, 3, "gpudist 0.1.0")])
    assert set(texts) == {
        "PlanMismatch: ranks disagree about what they run:\n"
        "  rank 0: gpudist 0.1.0\n  rank 1: gpudist 0.2.0\n"
        "install the same gpudist on every node, and start every rank with the same variables and "
        "arguments of init()"
    }


@pytest.mark.parametrize("stale", [1, 2])
def test_a_process_of_a_job_of_another_size(stale: int) -> None:
    """Rank 2 of 3 has a number that no rank of a world of 2 has."""
    (text,) = set(said([(1, 2, "gpudist"), (stale, 3, "gpudist"), (0, 2, "gpudist")]))
    assert text.startswith("PlanMismatch: ranks disagree about what they run:\n  rank 1: gpudist,")
    for size in (2, 3):
        assert (
            f"gpudist, one of {size} ranks, process {os.getpid()} on {socket.gethostname()}" in text
        )


def test_three_processes_of_one_rank_are_told_the_same() -> None:
    (text,) = set(said([(1, 3, "")] * 3 + [(0, 3, ""), (2, 3, "")]))
    mine = f"process {os.getpid()} on {socket.gethostname()}"
    assert text.startswith(f"TransportError: 2 processes are rank 1 of 3: {mine}, {mine}; end the")


@pytest.mark.parametrize(("rank", "size", "text"), [(1, 2, "0.1"), (2, 3, "0.1"), (0, 2, "0.2")])
def test_who_arrives_at_a_complete_world_raises_alone(rank: int, size: int, text: str) -> None:
    store = dist.HashStore()
    said([(0, 2, "0.1"), (1, 2, "0.1")], store)
    agreement(store, 0, 2).complete()
    with pytest.raises(Outsider, match=rf"would be rank {rank} of {size}, .* of 2 is process \d+"):
        agreement(store, rank, size).say(text)
    agreement(store, 1, 2).complete()


def test_a_refusal_comes_before_the_world_is_complete_or_not_at_all() -> None:
    store = dist.HashStore()
    assert any(said([(0, 2, ""), (1, 2, ""), (1, 2, "")], store))
    for rank in range(2):
        with pytest.raises(TransportError, match="2 processes are rank 1 of 2"):
            agreement(store, rank, 2).complete()


def test_unreadable_arrivals() -> None:
    store = dist.HashStore()
    for number, text in enumerate(["no list", "[1]", '["one", 2, "", ""]'], 1):
        store.set(f"world/said/{number}", text)
        store.add("world/said/count", 1)
    assert "2 processes are rank 0" in said([(0, 2, ""), (0, 2, "")], store)[1]
    store.set("world/said/verdict", "{")
    with pytest.raises(TransportError, match="a failure that cannot be read"):
        agreement(store, 0).complete()


@pytest.mark.parametrize(("theirs", "kind"), [("0.2.0", PlanMismatch), ("", CollectiveTimeout)])
def test_a_rank_that_cannot_connect_looks_for_what_differs(
    theirs: str, kind: type[Exception]
) -> None:
    store = dist.HashStore()
    if theirs:
        agreement(store, 1, 2).say(theirs)
    with pytest.raises(kind):
        connect("gloo", store, 0, 2, 0.3, "world")


@needs_core
@pytest.mark.parametrize("transport", ["host", "gloo", "nccl"])
def test_worlds_of_processes_of_one_rank(transport: str) -> None:
    """All processes raise the same error, also those that wait for ranks or have not arrived."""
    if transport == "nccl":
        use_doubles()
    store, texts = dist.HashStore(), [""] * 4

    def start(number: int, rank: int) -> None:
        try:
            connect(transport, store, rank, 3, 20.0, "world").close()
        except GpudistError as error:
            texts[number] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=start, args=a) for a in enumerate((0, 1, 1, 2))]
    start_s = time.monotonic()
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join()
    assert time.monotonic() - start_s < allowed_s(5.0)
    assert len(set(texts)) == 1 and texts[0].startswith("TransportError: 2 processes are rank 1")


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

    def add(self, key: str, number: int) -> int:
        self.answers.wait()
        return number


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

    def add(self, key: str, number: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_names_its_host() -> None:
    with pytest.raises(PeerFailure, match="the store of this world is gone: rank 1") as caught:
        connect("gloo", LostStore(), 0, 2, 20.0, "world", store_rank=1)
    assert caught.value.rank == 1


def test_one_that_has_joined_looks_no_more() -> None:
    store = dist.HashStore()
    mine = agreement(store, 0)
    mine.say("gpudist 0.1.0")
    mine.close()
    with pytest.raises(PlanMismatch):
        agreement(store, 1).say("gpudist 0.2.0")
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        mine.look()
        time.sleep(0.05)


def test_one_that_waits_looks_by_itself() -> None:
    store = dist.HashStore()
    mine = agreement(store, 0)
    mine.say("gpudist 0.1.0")
    with pytest.raises(PlanMismatch):
        agreement(store, 1).say("gpudist 0.2.0")
    deadline_s = time.monotonic() + 5.0
    with pytest.raises(PlanMismatch, match=r"rank 1: gpudist 0\.2\.0"):
        while time.monotonic() < deadline_s:
            mine.look()
            time.sleep(0.05)
