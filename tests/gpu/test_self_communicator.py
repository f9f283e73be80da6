"""NCCL's own calls, from its configuration to its abort, by one rank that sends to itself.

A world of one needs no communicator, and several ranks on one GPU need NCCL 2.30: with an older
NCCL and one GPU only these tests run it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.spawn import get_executable

import pytest
import torch

from gpudist.errors import TransportError
from gpudist.transport.nccl.transport import _native
from tests.gpu.devices import ON_DOUBLES, require_gpu, scaled
from tests.gpu.self_communicator import SelfCommunicator, pattern, self_communicator
from tests.gpu.streams import BUSY_CYCLES, recorded

require_gpu()

MIB = 1 << 20
SIZES = {"8 B": 8, "1 MiB": MIB, "64 MiB": scaled(64 * MIB, 2 * MIB)}
SOON_S = 5.0
every_size = pytest.mark.parametrize("nbytes", SIZES.values(), ids=list(SIZES))


@pytest.fixture(scope="module")
def alone() -> Iterator[SelfCommunicator]:
    with self_communicator() as made:
        yield made


@pytest.fixture
def mortal() -> Iterator[SelfCommunicator]:
    """Return a communicator for a test that ends it."""
    with self_communicator() as made:
        yield made


def until(condition: Callable[[], bool], seconds: float = SOON_S) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@every_size
def test_messages_of_one_group(alone: SelfCommunicator, nbytes: int) -> None:
    """Three at once arrive in the order in which they were sent, twice over."""
    sent = [pattern(nbytes, seed, alone.device) for seed in range(3)]
    for _ in range(2):
        received = [torch.zeros_like(x) for x in sent]
        alone.exchange(sent, received)
        alone.finish()
        assert all(map(torch.equal, received, sent))


@every_size
def test_capture_and_replay(alone: SelfCommunicator, nbytes: int) -> None:
    """A graph moves what its input holds at each replay."""
    x = pattern(nbytes, 0, alone.device)
    y = torch.zeros_like(x)
    replay = recorded(lambda: alone.exchange([x], [y]), alone.device, rehearsed=True)
    for turn in range(1, 4):
        x.copy_(pattern(nbytes, turn, alone.device))
        y.zero_()
        replay()
        alone.finish()
        assert torch.equal(y, x)


def test_the_watchdog_sees_completion(alone: SelfCommunicator) -> None:
    """An operation is waited for until the GPU is done with it, and nobody asks."""
    x = pattern(MIB, 0, alone.device)
    y = torch.zeros_like(x)
    alone.exchange([x], [y])
    alone.finish()
    if not ON_DOUBLES:
        torch.cuda._sleep(BUSY_CYCLES)
    alone.exchange([x], [y])
    assert ON_DOUBLES or alone.core.oldest_s() > 0
    assert until(lambda: alone.core.oldest_s() == 0), alone.core.lines(4)
    (last,) = alone.core.lines(1)
    assert "to itself" in last and last.endswith("finished")


def test_finalize_and_destroy(mortal: SelfCommunicator) -> None:
    """Closing ends soon, after what is under way; then no message can be sent."""
    x = pattern(MIB, 0, mortal.device)
    y = torch.zeros_like(x)
    mortal.exchange([x], [y])
    start_s = time.monotonic()
    mortal.core.close(2 * SOON_S)
    assert time.monotonic() - start_s < SOON_S
    assert torch.equal(y, x)
    with pytest.raises(TransportError, match="was closed"):
        mortal.exchange([x], [y])


def test_abort(mortal: SelfCommunicator) -> None:
    """A failed world ends at once, in any state, and the GPU remains usable."""
    x = torch.ones(MIB, dtype=torch.float32, device=mortal.device)
    y = torch.zeros_like(x)
    mortal.exchange([x], [y])
    mortal.finish()
    start_s = time.monotonic()
    if not ON_DOUBLES:
        torch.cuda._sleep(20 * BUSY_CYCLES)
        mortal.exchange([x], [y])
    mortal.fail("a test ends it")
    assert time.monotonic() - start_s < SOON_S
    assert "a test ends it" in mortal.core.failure()
    assert ON_DOUBLES or bool(y.isnan().all())
    with pytest.raises(_native.WorldFailed):
        mortal.exchange([x], [y])
    start_s = time.monotonic()
    mortal.core.close(SOON_S)
    assert time.monotonic() - start_s < 2 * SOON_S
    assert float((x + 1).sum()) == 2 * MIB


def test_a_program_ends_with_a_graph_alive() -> None:
    """NCCL does not give up a communicator while a graph has its messages; the program ends."""
    ended = subprocess.run(
        [get_executable(), "-m", "tests.gpu.graph_at_exit"],
        timeout=120, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "right\n"), ended.stderr
