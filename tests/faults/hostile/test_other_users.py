"""Other users of the machine cannot touch the memory that ranks share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpudist.transport.host.core_transport import is_built, what_is_missing

if not is_built():
    pytest.skip(what_is_missing(), allow_module_level=True)
import gpudist._native as _native
from gpudist.errors import TransportError

NOBODY = 65534
# As nobody: open a descriptor of a process, list them, read its memory, attach to it.
INTRUDER = f"""
import ctypes, os, sys
pid, fd, address = map(int, sys.argv[1:])
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
libc = ctypes.CDLL(None, use_errno=True)
for mode in (os.O_RDONLY, os.O_RDWR):
    try:
        os.open(f"/proc/{{pid}}/fd/{{fd}}", mode)
        print("opened")
    except PermissionError:
        print("refused")
try:
    os.listdir(f"/proc/{{pid}}/fd"); print("listed")
except PermissionError:
    print("refused")
try:
    os.open(f"/proc/{{pid}}/mem", os.O_RDONLY); print("memory opened")
except PermissionError:
    print("refused")
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
here, there = Piece(ctypes.addressof(buffer), 8), Piece(address, 8)
read = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print("refused" if read == -1 and ctypes.get_errno() == 1 else "memory read")
"""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user to try"
)


def run_as_another_user(*arguments: int) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-I", "-c", INTRUDER, *map(str, arguments)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("\n")[:-1]


@needs_root
def test_another_user_is_refused() -> None:
    core = _native.HostCommunicator(0, 2, 5.0)
    _, descriptor = core.address()
    assert run_as_another_user(os.getpid(), descriptor, id(core)) == ["refused"] * 5
    # The objects they were refused exist: this user may open them.
    os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
    core.close()


def test_segments_have_no_name_and_are_the_owners_alone() -> None:
    core = _native.HostCommunicator(0, 2, 5.0)
    _, descriptor = core.address()
    found = os.fstat(descriptor)
    assert found.st_mode & 0o7777 == 0o600 and found.st_uid == os.geteuid()
    assert found.st_nlink == 0
    assert not [path for path in Path("/dev/shm").iterdir() if "gpudist" in path.name]
    core.close()


@needs_root
def test_memory_of_another_user_is_not_taken_for_a_rank() -> None:
    """Root could map it: a stranger who writes to the store must not make it."""
    code = (
        "import fcntl, os, time; os.setgid({0}); os.setuid({0}); "
        "fd = os.memfd_create('bait', os.MFD_ALLOW_SEALING); os.ftruncate(fd, {1}); "
        "os.fchmod(fd, 0o600); fcntl.fcntl(fd, 1033, 7); "
        "print(fd, flush=True); time.sleep(60)"
    )
    core = _native.HostCommunicator(0, 2, 5.0)
    _, own = core.address()
    bytes_of = os.fstat(own).st_size
    bait = subprocess.Popen(
        [sys.executable, "-I", "-c", code.format(NOBODY, bytes_of)], stdout=subprocess.PIPE
    )
    try:
        assert bait.stdout is not None
        descriptor = int(bait.stdout.readline())
        with pytest.raises(TransportError, match="is not a shared segment of this user and size"):
            core.connect([(os.getpid(), own), (bait.pid, descriptor)])
    finally:
        bait.kill()
        bait.wait()
        assert bait.stdout is not None
        bait.stdout.close()
        core.close()
