"""Two hosts on one machine: separate namespaces, and a simulated link between them.

Each has its own network, processes, hostname, shared memory and table of names; they share the
kernel and thus the boot id. Nothing has a name outside and no packet leaves the link, so nothing
remains however a test ends.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.nodes.link import Link

ROOT = Path(__file__).resolve().parents[3]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_ARRIVAL_S = 20.0
_NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc"]
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "GPUDIST_",
              "GLOO_", "TORCHELASTIC_")  # fmt: skip


@dataclass
class Hosts:
    """Two commands under way on two hosts."""

    link: Link
    commands: list[subprocess.Popen[str]]

    def end(self) -> str:
        """Kill all that runs on both; what it has written."""
        for command in self.commands:
            command.kill()
        return "\n".join(command.communicate()[0] for command in self.commands)


def _unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, *_NAMESPACES, "--fork", "--kill-child"]


@functools.cache
def why_not() -> str:
    """Explain why this machine cannot have two hosts; empty if it can."""
    if shutil.which("unshare") is None:
        return "two hosts need unshare, of util-linux"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "two hosts need /dev/net/tun"
    script = "mount -t tmpfs shm /dev/shm"
    tried = subprocess.run([*_unshare(), "sh", "-c", script], capture_output=True, text=True)
    if tried.returncode:
        return f"two hosts need the privilege to make namespaces: {tried.stderr.strip()}"
    return ""


@contextmanager
def two_hosts(
    commands: Sequence[Sequence[str]],
    folder: Path,
    names: Sequence[str] = ("node", "node"),
    delay_s: float = 0.0005,
    loss: float = 0.0,
) -> Generator[Hosts, None, None]:
    """Run ``commands[i]`` on host i, at ``ADDRESSES[i]``; both end with the ``with`` statement.

    Args:
        commands: of the two hosts.
        folder: of the two hosts' own files.
        names: their hostnames, which each believes to be its loopback device.
        delay_s: of every packet on the link, each way.
        loss: the share of packets that are lost.
    """
    with ExitStack() as stack:
        started = []
        ends = []
        for i, command in enumerate(commands):
            (folder / str(i)).mkdir()
            process, end = _start(command, folder / str(i), names[i], ADDRESSES[i])
            stack.callback(_end, process)
            started.append(process)
            ends.append(end)
        link = Link((ends[0], ends[1]), delay_s, loss)
        stack.callback(link.close)
        yield Hosts(link, started)


def _start(
    command: Sequence[str], folder: Path, name: str, address: str
) -> tuple[subprocess.Popen[str], int]:
    """Return a host that runs ``command``, and the other end of its network device."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host = [sys.executable, str(Path(__file__).with_name("host.py"))]
        host += ["--socket", str(theirs.fileno()), "--name", name, "--address", address]
        process = subprocess.Popen(
            [*_unshare(), *host, "--folder", str(folder), "--", *command],
            env={**inherited, **known}, pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=ROOT,
        )  # fmt: skip
        theirs.close()
        ours.settimeout(_ARRIVAL_S)
        _, ends, _, _ = socket.recv_fds(ours, 16, 1)
    if not ends:
        raise RuntimeError(f"the host at {address} did not come up: {process.communicate()[0]}")
    return process, ends[0]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
