"""Messages between ranks by NCCL alone: nothing is packed, nothing is added."""

from __future__ import annotations

import pytest
import torch

from gpudist.transport.base import Signature
from gpudist.world.partition import Partition
from tests.gpu.devices import require_gpu, scaled
from tests.gpu.self_communicator import pattern
from tests.gpu.worlds import World

require_gpu()

MIB = 1 << 20
SIZES = {"8 B": 8, "64 MiB": scaled(64 * MIB, MIB)}


def round_the_ring(P_world: Partition, nbytes: int) -> list[int]:
    """Send to the next rank and receive from the one before, three times in one group.

    Returns:
        The messages with a wrong byte.
    """
    n, rank = P_world.size, P_world.rank or 0
    if n == 1:
        return []
    before, after = (rank - 1) % n, (rank + 1) % n
    sent = [pattern(nbytes, 10 * rank + i, P_world.device) for i in range(3)]
    received = [torch.zeros_like(x) for x in sent]
    communicator = P_world.communicator
    with P_world.wire.group(Signature.of(f"a ring of {nbytes} bytes")):
        for x, y in zip(sent, received, strict=True):
            communicator.send(x, after)
            communicator.recv(y, before)
    P_world.wire.wait()
    expected = (pattern(nbytes, 10 * before + i, P_world.device) for i in range(3))
    return [i for i, (y, x) in enumerate(zip(received, expected, strict=True)) if not y.equal(x)]


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=list(SIZES))
def test_ring(world: World, nbytes: int) -> None:
    if world.size == 1:
        pytest.skip("one rank has nobody to send to")
    assert world.run(round_the_ring, nbytes=nbytes) == [[]] * world.size
