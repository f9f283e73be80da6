"""Layers that other libraries compute wrongly, refuse, or gather.

Versions: DTensor of torch 2.13; ShardTensor of PhysicsNeMo 2.3; DistDL's last commit, of January
2022, and Microsoft's fork of it, of February 2025.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpudist
from gpudist import nn
from gpudist.errors import PartitionError
from gpudist.world.partition import Partition
from tests.nn.compare import (
    Slices,
    assert_block_of,
    assert_same_as_sequential,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

F64 = torch.float64
ROWS, COLUMNS, QUARTERS = [1, 1, 2, 1], [1, 1, 1, 2], [1, 1, 2, 2]
# Shapes of inputs.
SMALL, EVEN, ODD = (2, 3, 8, 8), (1, 3, 16, 8), (2, 4, 9, 8)
Case = tuple[str, tuple[int, ...], list[int], tuple[Any, ...], dict[str, Any]]
# What goes wrong elsewhere, and the layer, the input's shape, the grid, and the arguments. "sizes"
# are those of blocks of rows, and "ranks" the workers; the other keywords are the layer's.
CASES: dict[str, Case] = {
    # DTensor.
    "the output of a convolution is declared as split along the batch":
        ("Conv2d", SMALL, COLUMNS, (3, 4, 3, 1, 1), {}),
    "rows of a convolution get wrong numbers":
        ("Conv2d", SMALL, ROWS, (3, 4, 3, 1, 1), {}),
    "a convolution without padding raises":
        ("Conv2d", SMALL, COLUMNS, (3, 4, 3), {}),
    "a convolution without a halo raises":
        ("Conv2d", SMALL, COLUMNS, (3, 4, 2, 2), {}),
    "a stride raises":
        ("Conv2d", SMALL, COLUMNS, (3, 4, 3, 2, 1), {}),
    "a dilation raises":
        ("Conv2d", SMALL, COLUMNS, (3, 4, 3, 1, 2, 2), {}),
    "one dim raises":
        ("Conv1d", (2, 3, 8), [1, 1, 2], (3, 4, 3, 1, 1), {}),
    "three dims have no input gradient":
        ("Conv3d", (2, 2, 4, 5, 6), [1, 1, 1, 1, 2], (2, 3, 3, 1, 1), {}),
    "a submesh talks to ranks outside it":
        ("Conv2d", SMALL, COLUMNS, (3, 4, 3, 1, 1), {"ranks": [2, 3]}),
    "only the last dim of a grid is exchanged":
        ("Conv2d", SMALL, QUARTERS, (3, 4, 3, 1, 1), {}),
    "the last rank has no cell, as torch.chunk cuts":
        ("Conv2d", (2, 3, 6, 5), [1, 1, 4, 1], (3, 4, 3, 1, 1), {"sizes": [2, 2, 2, 0]}),
    "the backward of an average pool raises":
        ("AvgPool2d", SMALL, ROWS, (3, 2, 1), {}),
    "batch norm with split channels hangs":
        ("BatchNorm2d", (4, 4, 9, 8), [1, 2, 2, 1], (4,), {}),
    # ShardTensor.
    "8 rows of output where 7 are right":
        ("Conv2d", EVEN, ROWS, (3, 4, 3, 2), {}),
    "a stride on odd shards gives wrong numbers":
        ("Conv2d", (1, 3, 17, 8), ROWS, (3, 4, 3, 2, 1), {"sizes": [9, 8]}),
    "a stride of the kernel gives wrong values and gradients":
        ("Conv2d", EVEN, ROWS, (3, 4, 3, 3), {}),
    "a rank must begin at an even row":
        ("Conv2d", (1, 3, 18, 8), ROWS, (3, 4, 1, 2), {"sizes": [7, 11]}),
    "an even kernel raises":
        ("Conv2d", EVEN, ROWS, (3, 4, 6, 4), {}),
    "padding on one side is wrong":
        ("Conv2d", (1, 3, 9, 8), ROWS, (3, 4, (4, 3)), {"padding": "same"}),
    "circular padding raises":
        ("Conv2d", (1, 3, 7, 6), QUARTERS, (3, 4, (3, 5), 1, (1, 2)), {"padding_mode": "circular"}),
    "a halo wider than the neighbour's block raises":
        ("Conv2d", (1, 2, 5, 4), [1, 1, 4, 1], (2, 3, (5, 1), 1, (2, 0)), {}),
    "the batch of a domain group must be 1":
        ("Conv2d", (5, 3, 8, 4), [2, 1, 2, 1], (3, 4, 3, 1, 1), {}),
    "a domain of one rank crashes":
        ("Conv2d", (2, 3, 6, 6), [1, 1, 1, 1], (3, 4, 3, 1, 1), {}),
    "a transposed convolution of odd shards raises":
        ("ConvTranspose1d", (2, 4, 7), [1, 1, 2], (4, 3, 3, 2, 1, 1), {"sizes": [6, 1]}),
    "the pool of a ResNet raises":
        ("MaxPool2d", SMALL, ROWS, (3, 2, 1), {}),
    "a padded pool gives wrong numbers":
        ("MaxPool2d", EVEN, ROWS, (2, 2, 1), {}),
    "windows that do not divide the shards raise":
        ("MaxPool2d", EVEN, [1, 1, 3, 1], (3,), {"sizes": [4, 4, 8]}),
    "ceil_mode raises":
        ("AvgPool2d", ODD, QUARTERS, (3, 2, 1), {"ceil_mode": True}),
    "the backward of an adaptive pool raises":
        ("AdaptiveAvgPool2d", ODD, [2, 1, 2, 1], ((3, 5),), {}),
    "group norm on two dims raises in backward":
        ("GroupNorm", (4, 4, 9, 8), QUARTERS, (2, 4), {}),
    "instance norm raises in backward":
        ("InstanceNorm2d", (4, 4, 9, 8), QUARTERS, (4,), {"affine": True}),
    "align_corners is wrong":
        ("Upsample", ODD, QUARTERS, (None, 2, "bilinear"), {"align_corners": True}),
    # DistDL and its fork.
    "9 outputs where 8 are right":
        ("Conv1d", (2, 3, 8), [1, 1, 2], (3, 4, 3, 1, 1), {"sizes": [6, 2]}),
    "the exchange works in place on a leaf":
        ("Conv2d", (2, 3, 5, 4), ROWS, (3, 4, 1), {}),
    "a stride hangs":
        ("Conv2d", (2, 3, 9, 8), ROWS, (3, 4, 3, 3, 1), {}),
    "each block is padded by its own edge":
        ("Conv2d", ODD, QUARTERS, (4, 3, (5, 3), 1, (2, 1)), {"padding_mode": "reflect"}),
    "a transposed convolution has the halos of the convolution":
        ("ConvTranspose2d", (2, 4, 7, 4), [1, 1, 3, 1], (4, 3, 4, 2, 1), {}),
    "the stride of a pool is 1, not its kernel":
        ("MaxPool2d", (2, 3, 9, 8), ROWS, (3,), {}),
    "padding always counts in an average":
        ("AvgPool2d", (2, 3, 9, 8), ROWS, (3, 2, 1), {"count_include_pad": False}),
    "layer norm averages the means of uneven blocks":
        ("LayerNorm", (4, 5, 7), [1, 2, 2], ((5, 7),), {}),
    "RMS norm refuses split features":
        ("RMSNorm", (4, 5, 7), [1, 1, 3], (7,), {}),
    "a fractional scale gives other cells":
        ("Upsample", ODD, QUARTERS, (None, 2.3, "nearest"), {}),
    "one cell with align_corners divides by zero":
        ("Upsample", ODD, QUARTERS, ((1, 1), None, "bilinear", True), {}),
    "a linear layer takes two dims only":
        ("Linear", (4, 5, 6), [3, 1, 1], (6, 4), {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@distributed(ranks=4)
def test_layers_are_torchs(P_world: Partition) -> None:
    for what, case in CASES.items():
        try:
            check(P_world, *case)
        except AssertionError as error:
            raise AssertionError(f"{what}: {case}") from error


def check(
    P_world: Partition,
    layer: str,
    shape: tuple[int, ...],
    parts: list[int],
    arguments: tuple[Any, ...],
    given: dict[str, Any],
) -> None:
    options = {name: value for name, value in given.items() if name not in ("sizes", "ranks")}
    if layer.startswith(("Conv", "Linear")) or "Norm" in layer:
        options["dtype"] = F64
    P_x = grid(P_world, parts, given.get("ranks"))
    sizes = {2: given["sizes"]} if "sizes" in given else None
    made: list[torch.nn.Module] = []

    def distributed_layer() -> torch.nn.Module:
        made.append(getattr(nn, f"Distributed{layer}")(P_x, *arguments, **options))
        return made[-1]

    def owned(name: str, whole: torch.Size) -> Slices | None:
        cells = made[-1].get_parameter(name).numel()
        if cells in (0, whole.numel()):
            return tuple(slice(0, n) for n in whole) if cells else None
        where = own_slices(shape, P_x, sizes)
        assert where is not None, f"{name}: cells on a rank outside the partition"
        return where[-len(whole) :] if layer in ("LayerNorm", "RMSNorm") else where[1:2]

    assert_same_as_sequential(
        lambda: getattr(torch.nn, layer)(*arguments, **options), distributed_layer,
        P_x, P_x, shape, owned, sizes=sizes,
    )  # fmt: skip
    for name, parameter in made[-1].named_parameters():
        held = P_world.allgather_data([parameter.numel()])
        assert any(cells for (cells,) in held), f"no rank has the parameter {name}"


@distributed(ranks=4)
def test_channels_are_split_on_the_output_too(P_world: Partition) -> None:
    """DistDL computes something else, and passes ``groups`` on to each block unchecked."""
    P_x, P_w = grid(P_world, [1, 2, 1, 1]), grid(P_world, [2, 2, 1, 1])
    with pytest.raises(PartitionError, match="splits the channels; give P_y and P_w"):
        nn.DistributedConv2d(P_x, 4, 4, 3)
    with pytest.raises(PartitionError, match="block-diagonal"):
        nn.DistributedConv2d(P_x, P_x, P_w, 4, 4, 3, groups=2)


@distributed(ranks=4)
def test_initial_weights_of_split_channels(P_world: Partition) -> None:
    """DistDL: each block draws by its own fan-in, from another distribution than torch's layer."""
    P_x, P_w = grid(P_world, [1, 2, 1]), grid(P_world, [2, 2, 1])
    torch.manual_seed(3)
    expected = torch.nn.Conv1d(6, 4, 3).weight.detach()
    torch.manual_seed(3)
    layer = nn.DistributedConv1d(P_x, P_x, P_w, 6, 4, 3)
    assert P_w.index is not None and isinstance(layer.weight, torch.Tensor)
    i, j, _ = P_w.index
    block = expected[2 * i : 2 * i + 2, 3 * j : 3 * j + 3]
    assert torch.equal(layer.weight.detach(), block)


@distributed(ranks=2)
def test_relu_in_place_between_convolution_and_pool(P_world: Partition) -> None:
    """DistDL: raises (#199), since the exchange of the pool marks its input as changed."""
    P_x = grid(P_world, ROWS)
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1, dtype=F64),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(3, 2, 1),
    )
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        nn.DistributedConv2d(P_x, 2, 3, 3, padding=1, dtype=F64),
        torch.nn.ReLU(inplace=True),
        nn.DistributedMaxPool2d(P_x, 3, 2, 1),
    )
    whole = random_like_all((2, 2, 8, 6), 1).requires_grad_()
    block = own_block(whole, P_x)
    expected, y = sequential(whole), layers(block)
    assert_block_of(y.detach(), expected.detach(), own_slices(expected.shape, P_x), "output")
    expected.square().sum().backward()
    y.square().sum().backward()
    assert_block_of(block.grad, gradient_of(whole), own_slices(whole.shape, P_x), "gradient")


@distributed(ranks=2)
def test_the_gradient_of_a_sum(P_world: Partition) -> None:
    """DistDL: ``sum`` gives a gradient whose cells share memory; the adjoint adds to it in place,
    [1, 1, 1, 1] where [1, 1, 1, 2] is right, and changes the caller's tensor."""
    P_x = grid(P_world, [1, 1, 2])
    x = own_block(random_like_all((1, 1, 8), 1), P_x)
    y = gpudist.halo_exchange(x, P_x, halo=((1, 1),))
    one = torch.ones((), dtype=F64)
    y.backward(one.expand(y.shape))
    expected = [1, 1, 1, 2] if P_world.rank == 0 else [2, 1, 1, 1]
    assert x.grad is not None and x.grad.flatten().tolist() == expected
    assert one.item() == 1
    x = torch.ones(4, dtype=F64, requires_grad=True)
    gpudist.all_sum_reduce(x, P_x, axes_reduce=[2]).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 4
