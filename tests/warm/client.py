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


def main() -> None:
    address, *arguments = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    ignored = [n for n in PASSED_ON if signal.getsignal(n) is signal.SIG_IGN]
    said = marshal.dumps((arguments, os.getcwd(), dict(os.environ), [int(n) for n in ignored]))
    files = array.array("i", [0, 1, 2])
    length = len(said).to_bytes(8, "little")
    server.sendmsg([length], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
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
