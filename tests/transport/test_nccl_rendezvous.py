"""Name of the GPU that all ranks of an NCCL world have, known once all have arrived."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from gpudist.transport.nccl.rendezvous import Rendezvous
from tests.transport.worlds import new_store


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (("NVIDIA H100", "NVIDIA H100", "NVIDIA H100"), "NVIDIA H100"),
        (("NVIDIA H100", "NVIDIA H200", "NVIDIA H100"), ""),
    ],
)
def test_ranks_know_their_gpu_if_all_have_the_same(gpus: tuple[str, ...], expected: str) -> None:
    store = new_store()

    def arrive(rank: int) -> str:
        meeting = Rendezvous(store, "gpudist/none/0", rank, len(gpus), 30.0, lambda: None)
        with closing(meeting):
            meeting.arrive(gpus[rank])
            return meeting.gpu

    with ThreadPoolExecutor(len(gpus)) as threads:
        assert list(threads.map(arrive, range(len(gpus)))) == [expected] * len(gpus)
