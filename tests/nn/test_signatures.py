"""Layers take torch's arguments after their partitions, with torch's names, order and defaults."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition

LAYERS: dict[str, type] = {
    name: layer for name, layer in vars(nn).items()
    if name in nn.__all__ and inspect.isclass(layer) and issubclass(layer, torch.nn.Module)
}  # fmt: skip
LIKE_TORCHS = {
    name: getattr(torch.nn, name.removeprefix("Distributed")) for name in LAYERS
    if hasattr(torch.nn, name.removeprefix("Distributed"))
}  # fmt: skip
PARTITIONS = ("P_x", "P_y", "P_w")
# Torch's losses warn if these are given; reduction replaces both.
DEPRECATED = ("size_average", "reduce")
# Arguments after torch's: the pools of torch have them in 2 and 3 dims only.
MORE = {"DistributedAvgPool1d": [("divisor_override", None)]}


def in_order(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and defaults of what may be given in order, without self and the partitions."""
    return [
        (each.name, each.default)
        for each in inspect.signature(function).parameters.values()
        if each.kind is Parameter.POSITIONAL_OR_KEYWORD and each.name not in ("self", *PARTITIONS)
    ]


def test_most_layers_are_like_torchs() -> None:
    assert len(LIKE_TORCHS) > 70 and set(MORE) < set(LIKE_TORCHS)


@pytest.mark.parametrize("name", LIKE_TORCHS)
def test_arguments_are_torchs(name: str) -> None:
    torchs = [each for each in in_order(LIKE_TORCHS[name]) if each[0] not in DEPRECATED]
    assert in_order(LAYERS[name]) == torchs + MORE.get(name, [])


@pytest.mark.parametrize("name", LAYERS)
def test_every_argument_has_a_name(name: str) -> None:
    kinds = {each.kind for each in inspect.signature(LAYERS[name]).parameters.values()}
    assert not kinds & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="typing has them from 3.11 on")
@pytest.mark.parametrize(
    "name", [name for name, layer in LAYERS.items() if "P_w" in inspect.signature(layer).parameters]
)
def test_overloads_are_what_is_accepted(name: str) -> None:
    init = LAYERS[name].__init__
    implemented = inspect.signature(init).parameters
    grids: Any = typing
    first, second = map(inspect.signature, grids.get_overloads(inspect.unwrap(init)))
    assert dict(first.parameters) == dict(implemented)
    assert list(second.parameters)[:4] == ["self", *PARTITIONS]
    rest = {key: one for key, one in second.parameters.items() if key not in PARTITIONS}
    assert rest == {key: one for key, one in implemented.items() if key not in PARTITIONS}


@pytest.mark.parametrize("name", LAYERS)
def test_a_wrong_keyword_is_answered_in_the_name_of_the_class(name: str) -> None:
    keyword = list(inspect.signature(LAYERS[name]).parameters)[-1]
    with pytest.raises(TypeError) as caught:
        LAYERS[name](**{f"{keyword}x": 1})
    assert str(caught.value) == (
        f"{name}() got an unexpected keyword argument '{keyword}x'. Did you mean {keyword!r}?"
    )
    with pytest.raises(TypeError) as caught:
        LAYERS[name](qqq=1)
    assert str(caught.value) == f"{name}() got an unexpected keyword argument 'qqq'"


def test_a_subclass_is_answered_in_its_own_name() -> None:
    class Mine(nn.DistributedConv2d):
        pass

    P_x = Partition(LoopbackTransport.single(), [0]).grid(1, 1, 1, 1)
    with pytest.raises(TypeError, match=r"^Mine\(\) got .*'strid'. Did you mean 'stride'\?$"):
        Mine(P_x, 2, 2, 3, strid=1)  # pyright: ignore


@pytest.mark.parametrize("name", ["Linear", "Embedding", "Conv1d", "ConvTranspose1d"])
def test_partitions_in_order_and_by_name_are_the_same(name: str) -> None:
    P_world = Partition(LoopbackTransport.single(), [0])
    axes = {"Linear": (2, 2, 2), "Embedding": (1, 2, 3)}.get(name, (3, 3, 3))
    P_x, P_y, P_w = (P_world.grid(*[1] * count) for count in axes)
    layer, sizes = LAYERS[f"Distributed{name}"], (4, 3, 2)[: 3 if "Conv" in name else 2]
    made = layer(P_x, P_y, P_w, *sizes), layer(P_x, *sizes, P_y=P_y, P_w=P_w)
    assert repr(made[0]) == repr(made[1])
    with pytest.raises(TypeError, match="multiple values for keyword argument 'P_y'"):
        layer(P_x, P_y, P_w, *sizes, P_y=P_y)
