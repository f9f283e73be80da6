"""Find the network address at which other ranks reach this one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

LOOPBACK = "127.0.0.1"


def host_of(store: Any) -> str:
    """Return the name or address of the node that hosts ``store``; loopback if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", LOOPBACK)


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches ``host``, without sending anything.

    The hostname is not used, because on many machines it resolves to the loopback device, which
    gloo would then use.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable_address(address: str, others: Iterable[str]) -> str:
    """Return ``address``, or the address towards a remote rank if ``address`` is of loopback.

    Ranks on the store's node may reach the store over the loopback device, all others reach it over
    the network.
    """
    if not is_loopback(address):
        return address
    away = next((other for other in others if not is_loopback(other)), None)
    return address if away is None else address_towards(away)
