"""At which of its addresses a rank is reached by the others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

LOOPBACK = "127.0.0.1"


def host_of(store: Any) -> str:
    """The name or address of the node where ``store`` is; this one's, if it is in no network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", LOOPBACK)


def address_towards(host: str) -> str:
    """This machine's own address on its way to ``host``, which is sent nothing.

    A machine's own name is no help: many give it to their loopback device, and gloo then takes
    that one.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable_address(own: str, others: Iterable[str]) -> str:
    """``own``, or where that is a loopback device's, the address on the way to another's.

    The ranks beside the store reach it over their loopback device if its name says so, all others
    over the network.
    """
    if not is_loopback(own):
        return own
    away = next((other for other in others if not is_loopback(other)), None)
    return own if away is None else address_towards(away)
