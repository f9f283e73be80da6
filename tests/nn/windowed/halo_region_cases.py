"""Chains of layers to test, in plain numbers, and the comparison with torch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gpudist import nn
from gpudist.nn.windowed.halo_region import POINTWISE
from gpudist.world.partition import CartesianPartition
from tests.nn.affine.conv_cases import CausalConv1d
from tests.nn.compare import Cut, Slices, assert_same_as_sequential
from tests.nn.placing import Placing
from tests.torchs_layers import torchs_layer

F64 = torch.float64
# Names without "Distributed", and arguments.
Chain = Sequence[tuple[str, dict[str, Any]]]
LOCAL = {module.__name__ for module in POINTWISE}


def arguments(
    name: str, given: dict[str, Any], dtype: torch.dtype, **placing: Any
) -> dict[str, Any]:
    """Add the dtype, for a layer that takes one, and the placement of its parameters."""
    return {**given, "dtype": dtype, **placing} if "Conv" in name else given


def sequential(chain: Chain, dtype: torch.dtype = F64) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for name, given in chain:
        make = CausalConv1d if name == "CausalConv1d" else partial(torchs_layer, name)
        layers.append(make(**arguments(name, given, dtype)))
    return torch.nn.Sequential(*layers)


def layers_of(
    P_x: CartesianPartition, chain: Chain, dtype: torch.dtype = F64, **placing: Any
) -> list[torch.nn.Module]:
    return [
        getattr(torch.nn, name)(**given)
        if name in LOCAL
        else getattr(nn, f"Distributed{name}")(P_x, **arguments(name, given, dtype, **placing))
        for name, given in chain
    ]


def region(
    P_x: CartesianPartition, chain: Chain, dtype: torch.dtype = F64, **options: Any
) -> nn.HaloRegion:
    return nn.HaloRegion(P_x, layers_of(P_x, chain, dtype), **options)


def owner(P_x: CartesianPartition) -> Any:
    """Every parameter is on the first rank."""

    def owned(name: str, shape: torch.Size) -> Slices | None:
        return tuple(slice(0, extent) for extent in shape) if P_x.rank == 0 else None

    return owned


def check(
    P_x: CartesianPartition,
    chain: Chain,
    shape: Sequence[int],
    sizes: Cut | None = None,
    x: torch.Tensor | None = None,
    batches: Sequence[int] = (),
    dtype: torch.dtype = F64,
    tolerance: float = 1e-10,
    agreement: dict[str, Any] | None = None,
    placing: Placing | None = None,
) -> None:
    """The region of a chain on ``P_x`` is torch's chain."""
    placed = placing or Placing({}, owner(P_x))

    def distributed() -> torch.nn.Module:
        layers = layers_of(P_x, chain, dtype, **placed.options)
        return placed.around(nn.HaloRegion(P_x, layers, **(agreement or {})))

    assert_same_as_sequential(
        lambda: sequential(chain, dtype),
        distributed,
        P_x,
        P_x,
        shape,
        placed.owned,
        sizes=sizes,
        output_sizes={d: blocks for d, blocks in (sizes or {}).items() if d < 2},
        x=x,
        tolerance=tolerance,
        batches=batches,
    )


def conv(dims: int, channels: tuple[int, int], kernel: Any = 3, **given: Any) -> Any:
    given = {"padding": 1, **given} if kernel == 3 and "padding" not in given else given
    return f"Conv{dims}d", {
        "in_channels": channels[0],
        "out_channels": channels[1],
        "kernel_size": kernel,
        **given,
    }


CHAINS_2D: dict[str, Chain] = {
    "convolutions": [
        conv(2, (2, 3)),
        ("ReLU", {"inplace": True}),
        conv(2, (3, 2)),
        conv(2, (2, 2)),
    ],
    "strides": [
        conv(2, (2, 3), stride=2),
        ("Tanh", {}),
        conv(2, (3, 2), 2, stride=2, bias=False),
        conv(2, (2, 1)),
    ],
    "dilations": [
        conv(2, (2, 3), dilation=2, padding=2),
        ("GELU", {}),
        conv(2, (3, 2), (1, 3), dilation=(1, 2), padding=(2, 1)),
    ],
    "same, even kernels": [
        conv(2, (2, 4), 4, padding="same"),
        conv(2, (4, 2), 2, padding="same", groups=2),
    ],
    "pointwise modules of zeros": [
        ("Sigmoid", {}),
        conv(2, (2, 3)),
        ("Softplus", {}),
        conv(2, (3, 2)),
        ("Hardsigmoid", {}),
    ],
    "pools": [
        conv(2, (2, 3)),
        ("MaxPool2d", {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("ELU", {}),
        ("AvgPool2d", {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False}),
        ("MaxPool2d", {"kernel_size": 2, "stride": 1, "dilation": 2, "padding": 1}),
    ],
    "pools, ceil_mode": [
        ("AvgPool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
        ("MaxPool2d", {"kernel_size": 2, "ceil_mode": True}),
        conv(2, (2, 3), 1),
    ],
    "norms of windows": [
        ("Sigmoid", {}),
        ("LPPool2d", {"norm_type": 3, "kernel_size": 3, "stride": 2, "ceil_mode": True}),
        ("LPPool2d", {"norm_type": float("inf"), "kernel_size": 2, "stride": 1}),
    ],
    "pads": [
        ("ConstantPad2d", {"padding": (3, -1, 2, 4), "value": 0.5}),
        conv(2, (2, 3)),
        ("ZeroPad2d", {"padding": (-1, 2, 0, 3)}),
        ("MaxPool2d", {"kernel_size": 2}),
    ],
    "transposed": [
        conv(2, (2, 3), stride=2),
        ("ConvTranspose2d", {"in_channels": 3, "out_channels": 2, "kernel_size": 3, "stride": 2}),
        ("SiLU", {}),
        (
            "ConvTranspose2d",
            {
                **{
                    "in_channels": 2,
                    "out_channels": 2,
                    "kernel_size": 1,
                    "stride": 3,
                    "padding": 1,
                },
                "bias": False,
            },
        ),
        conv(2, (2, 1)),
    ],
    "padding alone": [
        conv(2, (2, 2), 1, padding=6),
        conv(2, (2, 2), 1, padding=6),
        conv(2, (2, 2)),
    ],
}
