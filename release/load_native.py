"""Load an installed native core and send bytes between two processes, without torch.

``python load_native.py``, by :mod:`release.wheel_test`, where torch cannot be had without gigabytes
of CUDA. ``gpudist`` itself imports torch, so that a bare package stands for it here.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import multiprocessing
import sys
import types
from multiprocessing.connection import Connection
from typing import Any

BYTES = 3 << 20
TIMEOUT_S = 60.0


def native_core() -> Any:
    found = importlib.util.find_spec("gpudist")
    assert found is not None and found.submodule_search_locations is not None
    package = types.ModuleType("gpudist")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["gpudist"] = package
    return importlib.import_module("gpudist._native")


def exchange(native: Any, rank: int, peer: Connection) -> None:
    """Send a block to the other process and compare what arrives with what it sends."""
    core = native.HostCommunicator(rank, 2, TIMEOUT_S, False)
    peer.send(core.address())
    theirs = peer.recv()
    core.connect([core.address(), theirs] if rank == 0 else [theirs, core.address()])
    signature = native.Signature("load_native", bytes(16))
    sent = ctypes.create_string_buffer(bytes([rank + 1]) * BYTES, BYTES)
    received = ctypes.create_string_buffer(BYTES)
    core.begin(signature)
    messages = [
        core.post_send(ctypes.addressof(sent), BYTES, 1 - rank, signature),
        core.post_receive(ctypes.addressof(received), BYTES, 1 - rank, signature),
    ]
    core.wait(messages)
    assert received.raw == bytes([2 - rank]) * BYTES
    peer.send(None)  # both have read before either ends
    peer.recv()
    core.close()


def main() -> None:
    native = native_core()
    print(f"Python {sys.version.split()[0]}: {native.__file__}")
    print(f"CUDA half: {native.cuda_information()}")
    assert native.cuda_information() is not None and native.device_missing() == ""
    fork = multiprocessing.get_context("fork")
    ends = fork.Pipe()
    ranks = [fork.Process(target=exchange, args=(native, rank, ends[rank])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(2 * TIMEOUT_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    print(f"2 processes exchanged {BYTES} bytes each: right")


if __name__ == "__main__":
    main()
