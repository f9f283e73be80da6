"""The text of a layer shows everything that torch's text shows, and the partitions."""

from __future__ import annotations

import inspect
import random
import re
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import GpudistError
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition
from tests.fuzz.families import by_layer

# Torch has none of these.
OWN = {
    "BatchNorm", "CausalConv1d", "ColumnParallelLinear", "HaloRegion", "ParallelAttention",
    "RowParallelLinear",
}  # fmt: skip
SAMPLES = {row.name.removeprefix("Distributed"): row for row in nn.LAYERS}
LAYERS = sorted(SAMPLES.keys() - OWN)
DRAWS = 6


def drawn(layer: str, number: int) -> tuple[int, dict[str, Any]]:
    """Return the dims of an input, and arguments that torch's layer takes and the fuzzer draws."""
    case = by_layer()[layer].draw(random.Random(number), layer, 1)
    sizes = {"in_channels": case.shape[:2][-1], "in_features": case.shape[-1]}
    given = {**sizes, **(case.options or SAMPLES[layer].arguments)}
    # Some are stand-ins for tensors.
    taken = inspect.signature(getattr(torch.nn, layer)).parameters.keys() - {"weight", "pos_weight"}
    return len(case.shape), {name: given[name] for name in given if name in taken}


def parts_of(layer: torch.nn.Module) -> list[str]:
    """Split a layer's text at the commas outside of parentheses."""
    return re.split(r", (?![^(\[]*[)\]])", layer.extra_repr())


def check(layer: str, dims: int, arguments: dict[str, Any]) -> None:
    P_world = Partition(LoopbackTransport.single(), [0])
    P_x = P_world.create_cartesian_topology_partition([1] * dims)
    sequential = getattr(torch.nn, layer)(**arguments)
    distributed = getattr(nn, f"Distributed{layer}")(P_x, **arguments)
    said = parts_of(distributed)
    assert f"P_x={list(P_x.shape)}" in said
    assert set(parts_of(sequential)) - {""} <= set(said)
    assert repr(distributed).startswith(f"Distributed{layer}(")


@pytest.mark.parametrize("layer", LAYERS)
def test_as_torch_says(layer: str) -> None:
    for number in range(DRAWS):
        dims, arguments = drawn(layer, number)
        try:
            check(layer, dims, arguments)
        except (GpudistError, ValueError) as error:  # torch's layer raises ValueError
            assert any(name in str(error) for name in arguments)


SWITCHES = [
    (layer, name, not parameter.default)
    for layer in LAYERS
    for name, parameter in inspect.signature(getattr(torch.nn, layer)).parameters.items()
    if isinstance(parameter.default, bool)
]


@pytest.mark.parametrize(
    ("layer", "name", "value"), SWITCHES, ids=[f"{f}, {n}={v}" for f, n, v in SWITCHES]
)
def test_switches(layer: str, name: str, value: bool) -> None:
    """Such as ``bias=False`` and ``ceil_mode=True``."""
    dims, arguments = drawn(layer, 0)
    try:
        check(layer, dims, {**arguments, name: value})
    except GpudistError as error:
        assert name in str(error)


def test_partitions_of_output_and_weight() -> None:
    P_world = Partition(LoopbackTransport.single(), [0])
    P = P_world.create_cartesian_topology_partition([1, 1])
    P_w = P_world.create_cartesian_topology_partition([1, 1, 1])
    P_y = P_world.create_cartesian_topology_partition([1, 1])
    layer = nn.DistributedLinear(P, P_y, P_w, 3, 2, bias=False)
    assert repr(layer) == (
        "DistributedLinear(in_features=3, out_features=2, bias=False, P_x=[1, 1], P_y=[1, 1], "
        "P_w=[1, 1, 1])"
    )
    causal = nn.DistributedCausalConv1d(P_w, 2, 2, 3)
    assert causal.extra_repr() == "2, 2, kernel_size=(3,), stride=(1,), P_x=[1, 1, 1]"
