"""Padding of the distributed convolution: copies of cells, in front only, or in any format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn import DistributedCausalConv1d, DistributedConv1d, DistributedConv2d
from gpudist.world.partition import Partition
from tests.nn.affine.conv_cases import (
    DISTRIBUTED,
    F64,
    SEQUENTIAL,
    check,
    owner,
    placed,
)
from tests.nn.affine.test_conv_graph import operations
from tests.nn.compare import (
    assert_block_of,
    assert_parameter_gradients,
    build_both,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

MODES = ["reflect", "replicate", "circular"]


@pytest.mark.parametrize("mode", ["zeros", *MODES])
@distributed(ranks=6, transports=["loopback"])
def test_nested_exchanges(P_world: Partition, mode: str) -> None:
    options: dict[str, Any] = {"padding_mode": mode, "agreement": {"nested": True}}
    P_x = grid(P_world, [1, 1, 2, 3])
    for kernel, padding in ((3, 1), (5, 4)):
        check(P_x, 2, 3, kernel, 1, padding, shape=(2, 2, 7, 8), sizes={2: [1, 6]}, **options)
    P_x, P_y, P_w = (grid(P_world, s) for s in ([1, 1, 2, 1], [1, 2, 2, 1], [2, 1, 2, 1]))
    check(P_x, 2, 4, 3, 1, 2, others=(P_y, P_w), shape=(2, 2, 5, 6), **options)


@distributed(ranks=4)
def test_nested_exchanges_on_every_transport(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    x = random_like_all((2, 3, 4, 4), P_x.rank or 0)
    results: list[torch.Tensor] = []
    for nested in (False, True):
        torch.manual_seed(0)
        layer = DistributedConv2d(P_x, 3, 4, 3, padding=1, dtype=F64, nested=nested)
        results.append(layer(x))
        bound: Any = next(iter(layer._bindings._results.values()))
        steps = len(bound.halo.steps)
        assert steps == (2 if nested else 1)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@distributed(ranks=4, transports=["loopback"])
def test_one_group_of_messages(P_world: Partition, mode: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    options: dict[str, Any] = {"padding": 1, "padding_mode": mode}
    layer = DistributedConv2d(P_x, 3, 4, 3, global_shape=(2, 3, 6, 6), **options)
    x = torch.randn(2, 3, 3, 3, requires_grad=True)
    before = operations(P_world)
    y = layer(x)
    assert operations(P_world) == before + 1
    y.sum().backward()
    assert operations(P_world) == before + 2


@pytest.mark.parametrize("mode", MODES)
@distributed(ranks=3, transports=["loopback"])
def test_a_whole_dim_moves_no_cells(P_world: Partition, mode: str) -> None:
    """Nor does the block: torch pads it."""
    layer = DistributedConv1d(grid(P_world, [3, 1, 1]), 2, 3, 3, padding=2, padding_mode=mode)
    layer(torch.randn(1, 2, 5))
    (bound,) = layer._bindings._results.values()
    assert (bound.halo is not None) is (mode == "circular")


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["features", "both", "disjoint", "all"])
@distributed(ranks=9, transports=["loopback"])
def test_double_backward(P_world: Partition, case: str, mode: str, power: int) -> None:
    P_x, P_y, P_w = placed(P_world, case)
    owned = owner(P_w, (P_w.shape[0], P_w.shape[1]))
    options: dict[str, Any] = {"padding": (1, 2), "padding_mode": mode, "dtype": F64}
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(5, 4, 3, **options),
        lambda: DistributedConv2d(P_x, P_y, P_w, 5, 4, 3, **options),
        owned,
    )
    whole = random_like_all((2, 5, 2, 7), 1).requires_grad_()
    block = own_block(whole, P_x)
    for model, x in ((sequential, whole), (layer, block)):
        leaves = [x, *model.parameters()]
        gradients = torch.autograd.grad(
            model(x).pow(power).sum(), leaves, create_graph=True, allow_unused=True
        )
        penalty = sum((g.pow(2).sum() for g in gradients if g is not None), torch.zeros(()))
        if penalty.requires_grad:
            penalty.backward()
    where = own_slices(whole.shape, P_x)
    if where is not None or block.grad is not None:
        assert_block_of(block.grad, gradient_of(whole), where, "input")
    for name, reference in sequential.named_parameters():
        where, actual = owned(name, reference.shape), layer.get_parameter(name).grad
        if reference.grad is not None and (where is not None or actual is not None):
            assert_block_of(actual, reference.grad, where, name)


@distributed(ranks=3, transports=["loopback"])
def test_causal_outputs_depend_on_no_later_input(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 3])
    layer = DistributedCausalConv1d(P_x, 2, 3, 3, dilation=2, dtype=F64)
    whole = random_like_all((1, 2, 12), 1)
    before = layer(own_block(whole, P_x))
    whole[..., 7:] += 1
    after = layer(own_block(whole, P_x))
    start = own_slices(whole.shape, P_x)[2].start  # type: ignore[index]
    changed = [start + t for t in range(4) if not torch.equal(before[..., t], after[..., t])]
    assert changed == [t for t in range(start, start + 4) if t >= 7]


@distributed(ranks=2, transports=["loopback"])
def test_causal_arguments_that_do_not_fit_are_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    for mode in ("reflect", "circular"):
        message = f"DistributedCausalConv1d: padding_mode '{mode}' is not supported; use 'zeros' or"
        with pytest.raises(ShapeError, match=message):
            DistributedCausalConv1d(P_x, 2, 3, 3, padding_mode=mode)
    with pytest.raises(TypeError, match="padding"):
        DistributedCausalConv1d(P_x, 2, 3, 3, padding=1)  # pyright: ignore
    with pytest.raises(PartitionError, match="DistributedCausalConv1d"):
        DistributedCausalConv1d(grid(P_world, [1, 2, 1]), 2, 3, 3)


@pytest.mark.parametrize(
    "mode, padding, message",
    [
        ("reflect", (0, 3), r"dim 3: reflected padding \(3, 3\) must be less than the global ext"),
        ("reflect", (5, 0), r"dim 2: reflected padding \(5, 5\) must be less .* extent 4"),
        ("circular", (0, 4), r"dim 3: circular padding \(4, 4\) must be at most the .* extent 3"),
    ],
)
@pytest.mark.parametrize("case", ["features", "both", "disjoint"])
@distributed(ranks=9, transports=["loopback"])
def test_padding_that_does_not_fit_is_refused_on_every_rank(
    P_world: Partition, case: str, mode: str, padding: tuple[int, int], message: str
) -> None:
    P_x, P_y, P_w = placed(P_world, case)
    P_all = P_x.create_partition_union(P_w).create_partition_union(P_y)
    if not P_all.active:
        return
    options: dict[str, Any] = {"padding": padding, "padding_mode": mode, "dtype": F64}
    layer = DistributedConv2d(P_x, P_y, P_w, 4, 4, 1, **options)
    with pytest.raises(ShapeError, match=f"DistributedConv2d, {message}"):
        layer(own_block(random_like_all((2, 4, 4, 3), 0), P_x))


@distributed(ranks=2, transports=["loopback"])
def test_replicated_padding_of_nothing_is_refused(P_world: Partition) -> None:
    layer = DistributedConv1d(
        grid(P_world, [1, 1, 2]), 2, 3, 1, padding=1, padding_mode="replicate"
    )
    with pytest.raises(ShapeError, match=r"dim 2: .* needs at least one cell"):
        layer(torch.randn(2, 2, 0))


@pytest.mark.parametrize("dims, channels", [(2, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate"])
@distributed(ranks=4, transports=["loopback", "host"])
def test_channels_last_stays(P_world: Partition, dims: int, channels: int, mode: str) -> None:
    """The output's strides are those of torch's layer, and so are the gradient's."""
    form = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    spatial = (6, 4, 4)[:dims]
    options: dict[str, Any] = {"padding": 1, "padding_mode": mode}
    for shape in ((2, 2, 1), (4, 1, 1), (1, 1, 1)):
        P_x = grid(P_world, [1, 1, *shape[:dims]])
        layer = DISTRIBUTED[dims](P_x, channels, 4, 3, **options)
        reference = SEQUENTIAL[dims](channels, 4, 3, **options)
        cells = (2, channels, *(-(-n // p) for n, p in zip(spatial, shape, strict=False)))
        for given in (form, torch.contiguous_format):
            expected_x = torch.randn(cells).to(memory_format=given).requires_grad_()
            expected = reference(expected_x)
            if not P_x.active:
                continue
            x = own_block(torch.randn(2, channels, *spatial), P_x).detach()
            x = x.to(memory_format=given).requires_grad_()
            y = layer(x)
            assert is_in(y, form) == is_in(expected, form) == (given == form)
            y.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape


def is_in(x: torch.Tensor, form: torch.memory_format) -> bool:
    return x.is_contiguous(memory_format=form) and not x.is_contiguous()


@distributed(ranks=4, transports=["loopback"])
def test_channels_last_gives_the_same_numbers(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    options: dict[str, Any] = {"padding": 2, "padding_mode": "reflect", "dtype": F64}
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(3, 4, 3, **options),
        lambda: DistributedConv2d(P_x, 3, 4, 3, **options),
        owner(P_x, (1, 1)),
    )
    whole = random_like_all((2, 3, 5, 6), 1).requires_grad_()
    block = own_block(whole, P_x).detach().to(memory_format=torch.channels_last).requires_grad_()
    y_whole, y = sequential(whole), layer(block)
    assert_block_of(y.detach(), y_whole.detach(), own_slices(y_whole.shape, P_x), "output")
    y_whole.sin().sum().backward()
    y.sin().sum().backward()
    assert_block_of(block.grad, gradient_of(whole), own_slices(whole.shape, P_x), "gradient")
    assert_parameter_gradients(sequential, layer, owner(P_x, (1, 1)))
