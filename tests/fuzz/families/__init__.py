"""The families of layers: each module draws configurations of its layers, and checks them."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import random
from typing import Protocol, cast

from gpudist.world.partition import Partition
from tests.fuzz.case import Case


class Family(Protocol):
    """Interface of a module in this folder.

    Attributes:
        LAYERS: the names of its layers, without "Distributed".
    """

    __name__: str
    LAYERS: tuple[str, ...]

    def draw(self, random: random.Random, layer: str, ranks: int) -> Case:
        """Draw a configuration on at most ``ranks`` ranks; the layer may refuse it."""
        ...

    def check(self, case: Case, P_world: Partition) -> None:
        """Compare the layer with torch's, on every rank of the world.

        Raises:
            AssertionError: they differ.
            GpudistError: the layer refuses the configuration.
        """
        ...


@functools.cache
def families() -> tuple[Family, ...]:
    """Return all families, by the names of their modules."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(cast(Family, importlib.import_module(f"{__name__}.{name}")) for name in names)


@functools.cache
def by_layer() -> dict[str, Family]:
    """Return the family of each layer, in the order of the modules and of their lists."""
    found: dict[str, Family] = {}
    for family in families():
        for layer in family.LAYERS:
            assert layer not in found, f"{layer} is in two families"
            found[layer] = family
    return found
