"""Load an installed native core and send bytes between two processes, without torch.

``python load_native.py``, by :mod:`release.wheel_test`, where torch cannot be had without gigabytes
of CUDA. ``gpudist`` itself imports torch, so that a bare package stands for it here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import sys
import types
from multiprocessing.connection import Connection

BYTES = 3 << 20
TIMEOUT_S = 60.0


def stand_in_for_package() -> None:
    found = importlib.util.find_spec("gpudist")
    assert found is not None and found.submodule_search_locations is not None
    package = types.ModuleType("gpudist")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["gpudist"] = package


def exchange(rank: int, peer: Connection) -> None:
    """Send a block to the other process and compare what arrives with what it sends."""
    from gpudist._native import BoundStage, Dtype, HostCommunicator, Signature

    core = HostCommunicator(rank, 2, TIMEOUT_S)
    ours = core.address()
    peer.send(ours)
    theirs = peer.recv()
    core.connect([ours, theirs] if rank == 0 else [theirs, ours])
    message = [(1 - rank, [[0, BYTES]])]
    stage = BoundStage(
        Dtype.uint8, [1], [1], BYTES, fill=0.0, starts_with_copy=False, same_cells=False,
        accumulates=False, fills=[], move_sources=[], move_destinations=[], sends=message,
        receives=message, sums=[], own_sources=[], relays=[], relayed=[],
    )  # fmt: skip
    sent = ctypes.create_string_buffer(bytes([rank + 1]) * BYTES, BYTES)
    received = ctypes.create_string_buffer(BYTES)
    signature = Signature("load_native", bytes(16))
    core.run(signature, [(stage, ctypes.addressof(sent), ctypes.addressof(received))])
    assert received.raw == bytes([2 - rank]) * BYTES
    peer.send(None)  # both have read before either ends
    peer.recv()
    core.close()


def main() -> None:
    stand_in_for_package()
    from gpudist import _native as native

    print(f"Python {sys.version.split()[0]}: {native.__file__}")
    print(f"CUDA half: {native.cuda_information() or 'not built'}")
    fork = multiprocessing.get_context("fork")
    ends = fork.Pipe()
    ranks = [fork.Process(target=exchange, args=(rank, ends[rank])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(2 * TIMEOUT_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    print(f"2 processes exchanged {BYTES} bytes each: right")


if __name__ == "__main__":
    main()
