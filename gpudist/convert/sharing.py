"""Converted networks of this process, and what a network may share with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakValueDictionary

from torch import nn

from gpudist.convert.converted import Converted, conversion_of
from gpudist.convert.network import Conversion
from gpudist.errors import ConversionError
from gpudist.world.partition import CartesianPartition

# Ranks may be threads.
_lock = Lock()
_networks: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


@contextmanager
def claimed(network: nn.Module, conversion: Conversion) -> Iterator[None]:
    """Keep a network for one conversion; an error in this context releases it.

    Raises:
        ConversionError: the network, or a part of it, belongs to another one with which it cannot
            share it.
    """
    with _lock:
        for other in list(_networks.values()):
            _require_apart(network, conversion, other)
        _networks[id(network)] = network
    try:
        yield
    except BaseException:
        del _networks[id(network)]
        raise


def require_new(network: nn.Module, P_x: CartesianPartition) -> None:
    """Raise if a network is converted already."""
    if not isinstance(network, Converted):
        return
    _require_same_rank("the network", P_x, network.P_x)
    raise ConversionError(
        f"distribute: {type(network).__name__} is converted already, in place; for another "
        "partition or plan, convert gpudist.sequential(network), or a copy.deepcopy made before"
    )


def _require_same_rank(part: str, P_x: CartesianPartition, P_other: CartesianPartition) -> None:
    rank, other_rank = P_x.world.rank, P_other.world.rank
    if rank != other_rank:
        raise ConversionError(
            f"distribute: ranks {other_rank} and {rank} are threads of one process, and both "
            f"convert {part!r}, one object in memory; build the network within the function that "
            "each rank runs"
        )


def _require_apart(network: nn.Module, conversion: Conversion, other: nn.Module) -> None:
    theirs = set(map(id, (*other.modules(), *other.parameters())))
    parts = (*network.named_modules(), *network.named_parameters())
    shared = next((name or "the network" for name, x in parts if id(x) in theirs), "")
    if not shared:
        return
    converted = conversion_of(other)
    _require_same_rank(shared, conversion.P_x, converted.P_x)
    are_full = not (conversion.has_blocks or converted.has_blocks)
    if not are_full or set(converted.P_x.ranks) != set(conversion.P_x.ranks):
        raise ConversionError(
            f"distribute: {shared!r} is also part of a converted {type(other).__name__}; networks "
            "may share modules and parameters if both are converted for the same workers, with "
            "full parameters and without a plan; else give one a copy.deepcopy"
        )
