"""The text of a layer shows everything that torch's text shows, and the partitions."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import GpudistError
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition
from tests.fuzz.case import Feature
from tests.fuzz.families import families

# Torch has none of these.
OWN = {
    "BatchNorm", "CausalConv1d", "ColumnParallelLinear", "HaloRegion", "ParallelAttention",
    "RowParallelLinear",
}  # fmt: skip
FEATURES = [
    feature for family in families() for feature in family.FEATURES if feature.layer not in OWN
]


def arguments_of(feature: Feature) -> dict[str, Any]:
    """Return the arguments that torch's layer takes, without a feature's stand-ins for tensors."""
    sizes = {"in_channels": feature.shape[1], "in_features": feature.shape[-1]}
    taken = inspect.signature(getattr(torch.nn, feature.layer)).parameters
    stand_ins = ("weight", "pos_weight")
    given = {**sizes, **feature.options}
    return {name: given[name] for name in taken if name in given and name not in stand_ins}


def parts_of(layer: torch.nn.Module) -> list[str]:
    """Split a layer's text at the commas outside of parentheses."""
    return re.split(r", (?![^(\[]*[)\]])", layer.extra_repr())


def check(feature: Feature, arguments: dict[str, Any]) -> None:
    P_world = Partition(LoopbackTransport.single(), [0])
    P_x = P_world.create_cartesian_topology_partition([1] * len(feature.shape))
    if feature.layer == "CosineEmbeddingLoss":
        P_x = P_world.create_cartesian_topology_partition([1, 1])
    sequential = getattr(torch.nn, feature.layer)(**arguments)
    layer = getattr(nn, f"Distributed{feature.layer}")(P_x, **arguments)
    said = parts_of(layer)
    assert f"P_x={list(P_x.shape)}" in said
    assert set(parts_of(sequential)) - {""} <= set(said)
    assert repr(layer).startswith(f"Distributed{feature.layer}(")


@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: f"{each.layer}, {each.feature}")
def test_as_torch_says(feature: Feature) -> None:
    arguments = arguments_of(feature)
    try:
        check(feature, arguments)
    except GpudistError as error:
        # The table has what is refused too.
        assert any(name in str(error) for name in arguments)


SWITCHES = [
    (feature, name, not parameter.default)
    for feature in {feature.layer: feature for feature in reversed(FEATURES)}.values()
    for name, parameter in inspect.signature(getattr(torch.nn, feature.layer)).parameters.items()
    if isinstance(parameter.default, bool)
]


@pytest.mark.parametrize(
    ("feature", "name", "value"), SWITCHES, ids=[f"{f.layer}, {n}={v}" for f, n, v in SWITCHES]
)
def test_switches(feature: Feature, name: str, value: bool) -> None:
    """Such as ``bias=False`` and ``ceil_mode=True``."""
    try:
        check(feature, {**arguments_of(feature), name: value})
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
