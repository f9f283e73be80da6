"""The system forbids a rank the calls that shared memory needs, as seccomp does in a container."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.transport.host.processes import has_ended
from tests import warm
from tests.doubles import use_doubles

ROOT = Path(__file__).resolve().parents[2]
CALLS = {"memfd_create": 319, "pidfd_open": 434}  # as x86-64 numbers them
pytestmark = [
    pytest.mark.skipif(not is_built(), reason="" if is_built() else what_is_missing()),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are x86-64's"),
]
RANKS = 3
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IS_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x50000, 0x7FFF0000


def forbid(call: str, error: int) -> None:
    """Let every later ``call`` of this process fail with ``error``."""
    steps = [
        (_LOAD, 0, 0, 0),
        (_IS_EQUAL, 0, 1, CALLS[call]),
        (_RETURN, 0, 0, _REFUSE | error),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and prctl(_SECCOMP, _FILTER, program, 0, 0) == 0


def joined(rank: int, port: int, transport: str) -> str:
    """How ``rank`` joins a world, over which it sends something, or why it does not."""
    import torch.distributed as dist

    from gpudist.errors import GpudistError
    from gpudist.world import runtime
    from gpudist.world.host_channel import host_partition
    from gpudist.world.launch import Launch

    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    launch = Launch("torchrun", rank, RANKS, RANKS, rank)
    try:
        wire = runtime._connect_all(transport, store, launch, 20.0, None, False)
        P_world = runtime.world_of(wire)
        P_host = host_partition(P_world)
        assert P_world.allreduce_data([1]) == P_host.allreduce_data([1]) == [RANKS]
        return f"joined over {P_world.transport} and {P_host.transport}"
    except GpudistError as error:
        return f"{type(error).__name__}: {error}"


def main(transport: str, call: str, error: str, others: str) -> None:
    import torch.distributed as dist

    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children: list[int] = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            if rank == 1 or others == "all":
                forbid(call, int(error))
            os.write(1, f"rank {rank} {joined(rank, store.port, transport)}\n".encode())
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def run(transport: str, call: str, error: int, others: str, asked: str) -> tuple[list[str], str]:
    """Return the output of each rank, by rank, and their log."""
    if transport == "nccl":
        use_doubles()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GPUDIST_TRANSPORT": asked}
    ended = subprocess.run(
        [warm.python(), "-m", __name__, transport, call, str(error), others],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return [
        re.sub(r"^rank \d ", "", line) for line in sorted(ended.stdout.splitlines())
    ], ended.stderr


@pytest.mark.parametrize("others", ["one", "all"])
@pytest.mark.parametrize(
    ("call", "error"),
    [("memfd_create", errno.EPERM), ("pidfd_open", errno.EPERM), ("pidfd_open", errno.ENOSYS)],
)
def test_all_ranks_take_gloo_or_refuse(call: str, error: int, others: str) -> None:
    """Ranks raise if the user demanded host, and none of them waits for the deadline."""
    why = rf"the system forbids rank \d the call \"{call} \({os.strerror(error)}\)\""
    said, logged = run("host", call, error, others, "")
    assert said == ["joined over gloo and gloo"] * RANKS
    assert len(re.findall(f"using gloo: {why}.*GPUDIST_TRANSPORT=gloo", logged)) == RANKS
    said, _ = run("host", call, error, others, "host")
    assert len(set(said)) == 1 and len(said) == RANKS
    assert re.match(f"NotOneNode: {why}.*set GPUDIST_TRANSPORT=gloo", said[0])


@pytest.mark.parametrize("others", ["one", "all"])
def test_nccl_goes_on_and_says_what_is_lost(others: str) -> None:
    said, logged = run("nccl", "pidfd_open", errno.EPERM, others, "nccl")
    assert said == ["joined over nccl and gloo"] * RANKS
    lost = "this node, so waits for a dead process end only at the deadline"
    assert logged.count(lost) == (RANKS if others == "all" else 1)
    assert logged.count("using gloo beside nccl: the system forbids rank") == RANKS


def test_the_end_of_a_process_where_it_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = subprocess.Popen(["sleep", "60"])
    assert not has_ended(os.getpid()) and not has_ended(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process.pid)  # a zombie
    process.wait()
    assert has_ended(process.pid)


if __name__ == "__main__":
    main(*sys.argv[1:])
