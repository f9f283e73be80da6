"""Represents a process of the server: sends it files, forwards signals, and ends as it does.

One is started for every process, so it imports as little as possible.
"""

import array
import marshal
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def _is_open(name: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{name}")  # that of the listing has been closed


def main() -> None:
    address, *arguments = sys.argv[1:]
    # All that are open, since their numbers may be among the arguments.
    files = [int(name) for name in os.listdir("/proc/self/fd") if _is_open(name)]
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    ignored = [n for n in PASSED_ON if signal.getsignal(n) is signal.SIG_IGN]
    numbers = [int(n) for n in ignored]
    said = marshal.dumps((arguments, os.getcwd(), dict(os.environ), numbers, files))
    passed = array.array("i", files)
    length = len(said).to_bytes(8, "little")
    server.sendmsg([length], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    server.sendall(said)
    for number in PASSED_ON:
        if number not in ignored:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
    status = int.from_bytes(server.recv(4), "little", signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
