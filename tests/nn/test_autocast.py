"""Under autocast, layers return the sequential layer's dtype, and its values to that precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.convert import distribute
from gpudist.errors import ShapeError
from gpudist.geometry.layout import broadcast
from gpudist.nn.distributed_module import is_single
from gpudist.world.partition import Partition
from tests.nn.compare import grid, own_block, own_slices, random_like_all
from tests.pool import distributed

TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 6e-3, torch.float32: 1e-5}
LOW = [torch.bfloat16, torch.float16]
SHAPE = (2, 4, 9, 7)

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "conv": lambda: torch.nn.Conv2d(4, 6, 3, padding=1),
    "circular conv": lambda: torch.nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular"),
    "conv transposed": lambda: torch.nn.ConvTranspose2d(4, 3, 3, stride=2),
    "batch norm": lambda: torch.nn.BatchNorm2d(4),
    "batch norm in evaluation": lambda: torch.nn.BatchNorm2d(4).eval(),
    "group norm": lambda: torch.nn.GroupNorm(2, 4),
    "instance norm": lambda: torch.nn.InstanceNorm2d(4, affine=True),
    "layer norm": lambda: torch.nn.LayerNorm([4, 9, 7]),
    "rms norm": lambda: torch.nn.RMSNorm([4, 9, 7]),
    "max pool": lambda: torch.nn.MaxPool2d(3, 2, 1),
    "average pool": lambda: torch.nn.AvgPool2d(3, 2, 1),
    "power pool": lambda: torch.nn.LPPool2d(2, 2),
    "adaptive pool": lambda: torch.nn.AdaptiveAvgPool2d(1),
    "adaptive max pool": lambda: torch.nn.AdaptiveMaxPool2d(2),
    "bilinear": lambda: torch.nn.Upsample(scale_factor=2, mode="bilinear"),
    "nearest": lambda: torch.nn.Upsample(scale_factor=2),
    "softmax": lambda: torch.nn.Softmax(dim=1),
    "softmax over a split dim": lambda: torch.nn.Softmax(dim=2),
    "prelu": lambda: torch.nn.PReLU(4),
    "reflection": lambda: torch.nn.ReflectionPad2d(2),
    "shuffle": lambda: torch.nn.PixelShuffle(2),
    "flatten and linear": lambda: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(4 * 9 * 7, 3)
    ),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", LAYERS)
@distributed(ranks=4, transports=["loopback"])
def test_converted_layers(P_world: Partition, name: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    torch.manual_seed(3)
    alone = LAYERS[name]()
    net: Any = distribute(copy.deepcopy(alone), P_x)
    check(alone, net, P_x, None, SHAPE)


SPLIT: dict[str, tuple[Any, ...]] = {
    "conv": ("Conv1d", (4, 6, 3), [1, 2, 2], [1, 1, 2], [1, 2, 2], (2, 4, 9)),
    "conv to split channels": ("Conv1d", (4, 6, 3), [1, 1, 2], [1, 2, 2], [2, 1, 2], (2, 4, 9)),
    "transposed": ("ConvTranspose1d", (4, 6, 3), [1, 2, 2], [1, 1, 2], [1, 2, 2], (2, 4, 9)),
    "transposed to split channels":
        ("ConvTranspose1d", (4, 6, 3), [1, 1, 2], [1, 2, 2], [2, 1, 2], (2, 4, 9)),
    "linear": ("Linear", (5, 7), [2, 2], [2, 1], [2, 1, 2], (5, 5)),
    "linear to split features": ("Linear", (5, 7), [2, 1], [2, 2], [2, 2, 1], (5, 5)),
}  # fmt: skip


@distributed(ranks=4, transports=["loopback", "host"])
def test_empty_blocks(P_world: Partition) -> None:
    """Blocks without cells have the dtype of the others: layers behind them move these."""
    P_x = grid(P_world, [1, 1, 4])
    torch.manual_seed(3)
    alone = torch.nn.Sequential(
        torch.nn.Conv1d(4, 3, 2, stride=3), torch.nn.Conv1d(3, 4, 3, padding=1),
        torch.nn.GroupNorm(2, 4), torch.nn.ConvTranspose1d(4, 2, 3), torch.nn.Conv1d(2, 2, 1),
    )  # fmt: skip
    net: Any = distribute(copy.deepcopy(alone), P_x)
    check(alone, net, P_x, None, (2, 4, 9))


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("name", SPLIT)
@distributed(ranks=5, transports=["loopback"])
def test_split_channels(P_world: Partition, name: str, replicated: bool) -> None:
    """A worker has no part in the layer."""
    kind, arguments, *grids, shape = SPLIT[name]
    P_x, P_y, P_w = (grid(P_world, one) for one in grids)
    for low in LOW:
        # Workers that get their input from others cannot know that its dtype changes.
        for given in (torch.float32, low):
            torch.manual_seed(3)
            alone = getattr(torch.nn, kind)(*arguments)
            torch.manual_seed(3)
            make = getattr(nn, f"Distributed{kind}")
            net = make(P_x, P_y, P_w, *arguments, replicate_parameters=replicated)
            check_one(alone, net, P_x, P_y, shape, low, given)


# Layers that split no channels.
WHOLE: dict[str, tuple[Any, ...]] = {
    "conv": ("Conv1d", (4, 6, 3), [1, 1, 4], (2, 4, 9)),
    "transposed": ("ConvTranspose1d", (4, 6, 3), [1, 1, 4], (2, 4, 9)),
    "linear": ("Linear", (5, 7), [2, 2, 1], (6, 7, 5)),
    "prelu": ("PReLU", (4,), [1, 2, 2], (2, 4, 9)),
    "batch norm": ("BatchNorm1d", (4,), [1, 2, 2], (2, 4, 9)),
    "group norm": ("GroupNorm", (2, 4), [1, 2, 2], (2, 4, 9)),
    "layer norm": ("LayerNorm", (9,), [1, 2, 2], (2, 4, 9)),
    "rms norm": ("RMSNorm", (9,), [1, 2, 2], (2, 4, 9)),
}
# Those that refuse an input of another dtype than their parameters'.
MATCHING = ("Conv1d", "ConvTranspose1d", "Linear", "PReLU")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@distributed(ranks=5, transports=["loopback"])
def test_layers_cast_after_a_call_under_autocast(P_world: Partition) -> None:
    """Parameters get the input's dtype, or lose autocast, after a call with the same input."""
    for kind, arguments, *grids, shape in (*SPLIT.values(), *WHOLE.values()):
        partitions = [grid(P_world, one) for one in grids]
        P_x, P_y = partitions[0], partitions[min(1, len(grids) - 1)]
        for low in LOW:
            torch.manual_seed(3)
            alone = getattr(torch.nn, kind)(*arguments)
            torch.manual_seed(3)
            net = getattr(nn, f"Distributed{kind}")(*partitions, *arguments)
            check_one(alone, net, P_x, P_y, shape, low, low)
            if kind in MATCHING and P_world.rank != 4:
                with pytest.raises(ShapeError, match=rf"{kind}: .* expected torch\.float32"):
                    net(own_block(random_like_all(shape, 1).to(low), P_x))
            check_one(alone.to(low), net.to(low), P_x, P_y, shape, low, low, enabled=False)


def check(
    alone: torch.nn.Module, net: torch.nn.Module, P_x: Any, P_y: Any, shape: tuple[int, ...]
) -> None:
    """Inputs in single precision, and in the one that a layer before gives.

    Without ``P_y`` outputs are global tensors.
    """
    for low in LOW:
        for given in (torch.float32, low):
            check_one(alone, net, P_x, P_y, shape, low, given)


def check_one(
    alone: torch.nn.Module, net: torch.nn.Module, P_x: Any, P_y: Any, shape: tuple[int, ...],
    low: torch.dtype, given: torch.dtype, enabled: bool = True,
) -> None:  # fmt: skip
    whole = random_like_all(shape, 1).to(given).requires_grad_()
    block = own_block(whole, P_x)
    what = f"{given} under {low}"
    with torch.autocast("cpu", low, enabled=enabled):
        y_whole, y = alone(whole), net(block)
    if P_y is None:
        copies = (broadcast,) * y.placement.axes
        y, where = y.full_tensor(grad_sbp=copies), ()
    else:
        where = own_slices(y_whole.shape, P_y)
    if where is not None:
        assert_close(y.detach(), y_whole.detach()[where], low, what)
    cotangent = random_like_all(y_whole.shape, 2).to(y_whole.dtype)
    y_whole.backward(cotangent)
    y.backward(torch.zeros_like(y) if where is None else cotangent[where])
    where = own_slices(shape, P_x)
    assert block.grad is not None and whole.grad is not None
    if where is not None:
        assert_close(block.grad, whole.grad[where], low, f"gradient of {what}")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, low: torch.dtype, what: str) -> None:
    """Errors are those of the sums that cells are made of, which have the size of the largest."""
    assert actual.dtype == expected.dtype, what
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    atol = TOLERANCE[low] * max(1.0, largest)
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=atol, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("Softmax", "cuda"), ("LayerNorm", "cuda"), ("GroupNorm", "cuda"), ("RMSNorm", "cuda"),
        ("CosineEmbeddingLoss", "cpu cuda"), ("MSELoss", "cpu cuda"), ("MaxPool3d", "cpu"),
        ("ReflectionPad1d", "cpu"), ("Conv2d", ""), ("Linear", ""), ("BatchNorm2d", ""),
    ],
)  # fmt: skip
def test_layers_in_single_precision_by_device(name: str, where: str) -> None:
    """Torch decides which layers are computed in float32, by its lists for each kind of device."""
    torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore
    for device in ("cpu", "cuda"):
        for low in LOW:
            torch.set_autocast_enabled(device, True)
            try:
                found = is_single(getattr(nn, f"Distributed{name}"), device, low, low)
            finally:
                torch.set_autocast_enabled(device, False)
            assert found == (device in where), (device, low)
