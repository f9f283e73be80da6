"""A layer accepts any arguments that torch's own accepts, or raises at construction."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import gpudist.nn as gnn
from gpudist.errors import ShapeError
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition
from tests.faults.hostile.anything import EXAMPLES, values

P_world = Partition(LoopbackTransport.single(), [0])
P_1, P_2, P_3 = (P_world.create_cartesian_topology_partition([1] * dim) for dim in (2, 3, 4))


def is_tried(value: object) -> bool:
    """True is 1 to gpudist, and not to all of torch; and 2**31 rows fill the memory."""
    return type(value) is not bool and not (type(value) is int and 1000 < value < 2**62)


sizes = values.filter(is_tried) | st.lists(st.integers(-1, 3), max_size=3).map(tuple)
REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError, OverflowError)
Make = Callable[..., torch.nn.Module]
LAYERS: dict[str, tuple[Any, Make, Make, list[str]]] = {
    "Conv1d": (
        (2, 2, 3), lambda *a, **k: gnn.DistributedConv1d(P_2, *a, **k), torch.nn.Conv1d,
        ["stride", "padding", "dilation", "groups", "padding_mode"],
    ),
    "Conv2d": (
        (2, 2, 3), lambda *a, **k: gnn.DistributedConv2d(P_3, *a, **k), torch.nn.Conv2d,
        ["stride", "padding", "dilation", "groups", "padding_mode"],
    ),
    "ConvTranspose1d": (
        (2, 2, 3), lambda *a, **k: gnn.DistributedConvTranspose1d(P_2, *a, **k),
        torch.nn.ConvTranspose1d, ["stride", "padding", "output_padding", "dilation", "groups"],
    ),
    "MaxPool2d": (
        (2,), lambda *a, **k: gnn.DistributedMaxPool2d(P_3, *a, **k), torch.nn.MaxPool2d,
        ["stride", "padding", "dilation"],
    ),
    "AvgPool1d": (
        (2,), lambda *a, **k: gnn.DistributedAvgPool1d(P_2, *a, **k), torch.nn.AvgPool1d,
        ["stride", "padding"],
    ),
    "BatchNorm1d": (
        (3,), lambda *a, **k: gnn.DistributedBatchNorm1d(P_2, *a, **k), torch.nn.BatchNorm1d, [],
    ),
    "GroupNorm": (
        (2, 4), lambda *a, **k: gnn.DistributedGroupNorm(P_2, *a, **k), torch.nn.GroupNorm, [],
    ),
    "LayerNorm": (
        (4,), lambda *a, **k: gnn.DistributedLayerNorm(P_1, *a, **k), torch.nn.LayerNorm, [],
    ),
    "Linear": (
        (3, 2), lambda *a, **k: gnn.DistributedLinear(P_1, *a, **k), torch.nn.Linear, [],
    ),
    "Embedding": (
        (4, 2), lambda *a, **k: gnn.DistributedEmbedding(P_1, *a, **k), torch.nn.Embedding,
        ["padding_idx"],
    ),
}  # fmt: skip
INPUTS = {"Conv1d": (1, 2, 5), "Conv2d": (1, 2, 5, 5), "ConvTranspose1d": (1, 2, 5)}
INPUTS |= {"MaxPool2d": (1, 2, 5, 5), "AvgPool1d": (1, 2, 5), "BatchNorm1d": (2, 3, 5)}
INPUTS |= {"GroupNorm": (2, 4, 3), "LayerNorm": (3, 4), "Linear": (2, 3), "Embedding": (2, 3)}


def result_of(
    make: Make, name: str, positional: Any, named: dict[str, Any], refusals: tuple[Any, ...]
) -> Any:
    """Return the output of the layer, or the type of what it raised, one of ``refusals``."""
    torch.manual_seed(1)
    try:
        layer = make(*positional, **named)
        x: torch.Tensor = torch.arange(1.0, 1 + torch.Size(INPUTS[name]).numel())
        x = x.view(INPUTS[name])
        return layer(x.long() % 4 if name == "Embedding" else x).detach()
    except refusals as error:
        assert str(error) or refusals != REFUSALS, f"{type(error).__name__} without a word"
        return type(error)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(data=st.data())
def test_anything(name: str, data: st.DataObject) -> None:
    """The layer raises if torch does; if both return a result, it is the same."""
    positional, distributed, sequential, names = LAYERS[name]
    given_now = list(positional)
    changes = data.draw(st.booleans(), "changes a size")
    if changes:
        given_now[data.draw(st.integers(0, len(given_now) - 1), "which")] = data.draw(sizes, "size")
    named = data.draw(st.dictionaries(st.sampled_from(names), sizes, max_size=2) if names else
                      st.just({}), "named")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = result_of(distributed, name, given_now, named, REFUSALS)
        theirs = result_of(sequential, name, given_now, named, (Exception,))
    if not changes and not named:
        assert isinstance(ours, torch.Tensor), f"refused its own defaults: {ours}"
    # Torch refuses some layers without outputs, which have an empty result here.
    if isinstance(ours, torch.Tensor) and ours.numel():
        assert isinstance(theirs, torch.Tensor), f"torch raises {theirs}"
        assert torch.allclose(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "ConvTranspose1d", "AvgPool1d"])
def test_a_stride_is_no_tensor(name: str) -> None:
    """Torch's layers refuse it, too, though only at the call."""
    positional, distributed, _, _ = LAYERS[name]
    with pytest.raises(ShapeError, match=r"it takes an integer or one per dim: stride.item\(\)"):
        distributed(*positional, stride=torch.tensor(1))
