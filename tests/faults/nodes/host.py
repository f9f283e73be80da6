"""Become a host with a network device inside new namespaces, then run a command.

    unshare --net ... python host.py --socket FD --name NAME --address ADDRESS -- COMMAND ...

The device is a tunnel: its other end goes to the owner of the socket, which carries its packets.
All of it ends with this process.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFFLAGS = 0x8916, 0x891C, 0x8914
IFF_UP, IFF_RUNNING = 0x1, 0x40
DEVICE = "link0"


def open_tunnel() -> int:
    tunnel = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tunnel, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return tunnel


def bring_up(device: str, address: str | None = None) -> None:
    """Give ``device`` an address in a network of 256, if any, and switch it on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        name = device.encode()
        asked = {SIOCSIFADDR: address, SIOCSIFNETMASK: "255.255.255.0"} if address else {}
        for request, number in asked.items():
            packed = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(number))
            fcntl.ioctl(control, request, struct.pack("16s16s", name, packed))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", name, IFF_UP | IFF_RUNNING))


def name_this_host(name: str, address: str, folder: Path) -> None:
    """Call it ``name``, which its own table gives to its loopback device, as Debian's does."""
    socket.sethostname(name)
    table = folder / "hosts"
    network = address.rpartition(".")[0]
    others = "".join(f"{network}.{i} host{i}\n" for i in (1, 2))
    table.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
    subprocess.run(["mount", "--bind", str(table), "/etc/hosts"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)
    name_this_host(options.name, options.address, options.folder)
    tunnel = open_tunnel()
    bring_up("lo")
    bring_up(DEVICE, options.address)
    with socket.socket(fileno=options.socket) as parent:
        socket.send_fds(parent, [b"up"], [tunnel])
    os.close(tunnel)
    return subprocess.run(options.command).returncode


if __name__ == "__main__":
    sys.exit(main())
