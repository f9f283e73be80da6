"""The convolution of the block in place, its faces apart, is the sequential convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist.nn import DistributedConv1d, DistributedConv2d
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.affine.conv_cases import DISTRIBUTED, F64, SEQUENTIAL, owner
from tests.nn.compare import (
    Cut,
    assert_block_of,
    assert_equal_to,
    assert_parameter_gradients,
    assert_same_as_sequential,
    build_both,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.in_place import blocks_of_any_size, has_faces, has_ghosts
from tests.pool import distributed


def check(
    P_x: CartesianPartition,
    *arguments: Any,
    shape: Sequence[int],
    sizes: Cut | None = None,
    batches: Sequence[int] = (),
    agreement: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The layer with its block in place if that is possible; returns it."""
    dims, layers = len(shape) - 2, []

    def make() -> torch.nn.Module:
        layer = DISTRIBUTED[dims](P_x, *arguments, dtype=F64, **options, **(agreement or {}))
        layers.append(layer)
        return layer

    with blocks_of_any_size():
        assert_same_as_sequential(
            lambda: SEQUENTIAL[dims](*arguments, dtype=F64, **options),
            make,
            P_x,
            P_x,
            shape,
            owner(P_x, (1, 1)),
            sizes=sizes,
            batches=batches,
        )
    return layers[0]


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
@distributed(ranks=4, transports=["loopback"])
def test_every_window_1d(P_world: Partition, kernel: int) -> None:
    used = 0
    for stride in (1, 2, 3):
        for padding in range(4):
            for parts, extent, dilation in ((2, 8, 1), (3, 13, 1), (4, 16, 1), (4, 12, 2)):
                if extent + 2 * padding <= dilation * (kernel - 1):
                    continue
                P_x = grid(P_world, [1, 1, parts])
                layer = check(P_x, 2, 3, kernel, stride, padding, dilation, shape=(2, 2, extent))
                used += P_x.active and has_faces(layer)
    if P_world.rank == 0:
        assert used == {1: 0, 2: 2, 3: 9, 4: 9, 5: 7}[kernel]


@pytest.mark.parametrize(
    "window",
    [
        (3, 1, 1, 1),
        (5, 1, 2, 1),
        (3, 1, 2, 2),
        ((3, 5), 1, (1, 2), 1),
        ((1, 3), 1, (0, 1), 1),
        ((3, 1), 1, (1, 0), 1),
        (3, (2, 1), 1, 1),
        (3, 2, 1, 1),
    ],
)
@distributed(ranks=6, transports=["loopback"])
def test_common_windows_2d(P_world: Partition, window: tuple[Any, ...]) -> None:
    for shape, extents in (
        ([1, 1, 2, 2], (8, 12)),
        ([1, 1, 2, 3], (12, 12)),
        ([2, 1, 1, 2], (7, 8)),
    ):
        P_x = grid(P_world, shape)
        layer = check(P_x, 3, 2, *window, shape=(2, 3, *extents))
        split = [d for d in (0, 1) if shape[d + 2] > 1 and layer.kernel_size[d] > 1]
        assert not P_x.active or has_faces(layer) == bool(split)


@pytest.mark.parametrize("kernel, padding", [(3, 1), ((1, 3, 5), (0, 1, 2))])
@distributed(ranks=8, transports=["loopback"])
def test_common_windows_3d(P_world: Partition, kernel: Any, padding: Any) -> None:
    for stride in (1, 2):
        layer = check(
            grid(P_world, [1, 1, 2, 2, 2]), 2, 3, kernel, stride, padding, shape=(2, 2, 4, 8, 8)
        )  # fmt: skip
        assert has_faces(layer)


@distributed(ranks=5)
def test_on_every_transport(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2], [4, 2, 1, 0])
    for bias in (True, False):
        layer = check(P_x, 3, 4, 3, padding=1, bias=bias, shape=(2, 3, 7, 6), batches=[1, 2])
        assert not P_x.active or has_faces(layer)
    layer = check(P_x, 4, 6, 5, padding=2, groups=2, shape=(2, 4, 6, 8))
    assert not P_x.active or has_faces(layer)


@pytest.mark.parametrize("extent, kernel", [(4, 3), (4, 7), (5, 5), (6, 7)])
@distributed(ranks=4)
def test_halos_wider_than_a_block(P_world: Partition, extent: int, kernel: int) -> None:
    for mode in ("zeros", "circular"):
        layer = check(
            grid(P_world, [1, 1, 4]), 2, 3, kernel, 1, kernel // 2, shape=(2, 2, extent),
            padding_mode=mode,
        )  # fmt: skip
        assert has_faces(layer)


@pytest.mark.parametrize("kernel", [3, 5, (1, 3)])
@distributed(ranks=4, transports=["loopback", "host"])
def test_circular_padding(P_world: Partition, kernel: Any) -> None:
    padding = kernel // 2 if isinstance(kernel, int) else (0, 1)
    for shape in ([1, 1, 2, 2], [1, 1, 1, 4], [2, 1, 2, 1], [1, 1, 1, 1]):
        P_x = grid(P_world, shape)
        layer = check(
            P_x, 2, 3, kernel, padding=padding, padding_mode="circular", shape=(2, 2, 5, 6)
        )  # fmt: skip
        assert not P_x.active or has_faces(layer)


@pytest.mark.parametrize("groups", [1, 2, 4])
@distributed(ranks=8, transports=["loopback"])
def test_batch_and_groups(P_world: Partition, groups: int) -> None:
    for shape in ((2, 1, 1, 2), (2, 1, 2, 2), (3, 1, 2, 1)):
        P_x = grid(P_world, shape)
        layer = check(P_x, 4, 8, 3, 1, 1, groups=groups, shape=(3, 4, 6, 5))
        assert not P_x.active or has_faces(layer)


@distributed(ranks=4, transports=["loopback"])
def test_uneven_and_empty_blocks(P_world: Partition) -> None:
    """Blocks that do not give their outputs, or are empty, are copied."""
    P_x = grid(P_world, [1, 1, 2])
    for window in ((3, 1, 1), (3, 2, 1), (5, 1, 2)):
        for sizes in ([6, 2], [8, 0], [0, 8], [4, 4]):
            layer = check(P_x, 2, 3, *window, shape=(2, 2, 8), sizes={2: sizes})
            assert not P_x.active or has_faces(layer) == (sizes == [4, 4])
    # A worker without outputs beside one whose outputs need its cells.
    layer = check(P_x, 2, 3, 3, 2, 1, shape=(2, 2, 2))
    assert not P_x.active or not has_faces(layer)
    layer = check(grid(P_world, [2, 1, 2]), 2, 3, 3, 1, 1, shape=(1, 2, 8))
    assert not has_faces(layer)
    layer = check(grid(P_world, [1, 1, 4]), 2, 3, 3, 1, 1, shape=(2, 2, 3))
    assert not has_faces(layer)


@pytest.mark.parametrize("window", [(1, 1, 0), (2, 2, 0), (1, 2, 0), (3, 3, 0)])
@distributed(ranks=4)
def test_a_block_without_ghosts_is_never_copied(P_world: Partition, window: Any) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    layer = DistributedConv2d(P_x, 2, 3, *window)
    x = torch.randn(2, 2, 6, 6, requires_grad=True)
    y: Any = layer(x)
    assert not has_ghosts(layer)
    assert y.grad_fn._saved_input.data_ptr() == x.data_ptr()
    check(P_x, 2, 3, *window, shape=(2, 2, 12, 12), agreement={"overlap": False})
    alone = DistributedConv2d(grid(P_world, [4, 1, 1, 1]), 2, 3, 3, padding=1, overlap=False)
    y = alone(x)
    assert y.grad_fn._saved_input.data_ptr() == x.data_ptr()


@distributed(ranks=4)
def test_ghosts_are_one_group_each_way_and_parameters_another_one(P_world: Partition) -> None:
    def operations() -> int:
        return P_world.wire.recorder.count

    P_x = grid(P_world, [1, 1, 2, 2])
    x = torch.randn(2, 3, 3, 3, requires_grad=True)
    with blocks_of_any_size():
        layer = DistributedConv2d(P_x, 3, 4, 3, padding=1, global_shape=(2, 3, 6, 6))
        y: Any = layer(x)
        assert y.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()
        y.sum().backward()
        before = operations()
        y = layer(x)
        assert operations() == before + 2
        y.sum().backward()
        assert operations() == before + 4
        assert "adjoint of ghosts" in P_world.wire.recorder.lines(last=2)[0]
        layer(x.detach()).sum().backward()
        assert operations() == before + 7
        assert "adjoint of ghosts" not in P_world.wire.recorder.lines(last=1)[0]
        with torch.no_grad():
            assert layer(x).grad_fn is None


@distributed(ranks=2)
def test_small_blocks_are_copied_and_overlap_can_be_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    for size, overlap, expected in ((8, True, False), (1024, True, True), (1024, False, False)):
        layer = DistributedConv2d(P_x, 1, 1, 3, padding=1, overlap=overlap)
        layer(torch.randn(1, 1, size, 512))
        assert has_faces(layer) == expected


@distributed(ranks=4)
def test_refused_overlap_gives_the_same(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    x = random_like_all((2, 3, 4, 5), P_world.rank or 0)
    results: list[list[torch.Tensor]] = []
    for overlap in (True, False):
        torch.manual_seed(1)
        layer = DistributedConv2d(P_x, 3, 4, 3, padding=1, dtype=F64, overlap=overlap)
        block = x.clone().requires_grad_()
        with blocks_of_any_size():
            y = layer(block)
        assert has_faces(layer) == overlap
        y.pow(2).sum().backward()
        parameters = [gradient_of(p) for p in layer.parameters()]
        results.append([y.detach(), gradient_of(block), *parameters])
    for actual, expected in zip(*results, strict=True):
        assert_equal_to(actual, expected, 1e-12, "with and without overlap")


@pytest.mark.parametrize(
    "frozen", ["weight", "bias", "weight and bias", "input", "input and weight"]
)
@distributed(ranks=4)
def test_frozen(P_world: Partition, frozen: str) -> None:
    P_x, owned = grid(P_world, [1, 1, 2, 2]), owner(grid(P_world, [1, 1, 2, 2]), (1, 1))
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(3, 4, 3, padding=1, dtype=F64),
        lambda: DistributedConv2d(P_x, 3, 4, 3, padding=1, dtype=F64),
        owned,
    )
    for model in (sequential, layer):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    whole = random_like_all((2, 3, 6, 7), 1).requires_grad_("input" not in frozen)
    block = own_block(whole, P_x, requires_grad=whole.requires_grad)
    for create_graph in (False, True):
        for t in (whole, block, *sequential.parameters(), *layer.parameters()):
            t.grad = None
        with blocks_of_any_size():
            y_whole, y = sequential(whole), layer(block)
        for out, model, x in ((y_whole, sequential, whole), (y, layer, block)):
            leaves = [t for t in (x, *model.parameters()) if t.requires_grad]
            gradients = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=create_graph)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient.detach()
        if whole.requires_grad:
            where = own_slices(whole.shape, P_x)
            assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
        for name, parameter in layer.named_parameters():
            reference = sequential.get_parameter(name)
            if reference.grad is None:
                assert parameter.grad is None
            else:
                where = owned(name, reference.shape)
                assert_block_of(parameter.grad, reference.grad, where, f"gradient of {name}")
    assert has_faces(layer)


def two_layers(P_x: CartesianPartition, mode: Any = "zeros") -> Any:
    def owned(name: str, shape: torch.Size) -> Any:
        return owner(P_x, (1, 1))(name.split(".")[1], shape)

    return *build_both(
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3, stride=2, padding=1, dtype=F64),
            torch.nn.Tanh(),
            torch.nn.Conv2d(3, 2, 3, padding=1, padding_mode=mode, dtype=F64),
        ),
        lambda: torch.nn.Sequential(
            DistributedConv2d(P_x, 2, 3, 3, stride=2, padding=1, dtype=F64),
            torch.nn.Tanh(),
            DistributedConv2d(P_x, 3, 2, 3, padding=1, padding_mode=mode, dtype=F64),
        ),
        owned,
    ), owned


@pytest.mark.parametrize("reentrant", [None, False, True])
@distributed(ranks=4)
def test_two_in_a_row_and_checkpoint(P_world: Partition, reentrant: bool | None) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    sequential, layers, owned = two_layers(P_x)
    whole = random_like_all((2, 2, 8, 12), 1).requires_grad_()
    block = own_block(whole, P_x)
    sequential(whole).pow(2).sum().backward()
    with blocks_of_any_size():
        y: Any = (
            layers(block)
            if reentrant is None
            else checkpoint(layers, block, use_reentrant=reentrant)
        )
        y.pow(2).sum().backward()
    assert has_faces(layers[0]) and has_faces(layers[2])
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
    assert_parameter_gradients(sequential, layers, owned)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("of", ["input", "parameters", "all"])
@distributed(ranks=4)
def test_double_backward(P_world: Partition, of: str, mode: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    sequential, layers, owned = two_layers(P_x, mode)
    whole = random_like_all((2, 2, 8, 12), 1).requires_grad_()
    block = own_block(whole, P_x)
    with blocks_of_any_size():
        for model, x in ((sequential, whole), (layers, block)):
            parameters = list(model.parameters())
            leaves = {"input": [x], "parameters": parameters, "all": [x, *parameters]}[of]
            gradients = torch.autograd.grad(
                model(x).pow(3).sum(), leaves, create_graph=True
            )  # fmt: skip
            torch.stack([g.pow(2).sum() for g in gradients]).sum().backward()
    assert has_faces(layers[0]) and has_faces(layers[2])
    assert_block_of(block.grad, gradient_of(whole), own_slices(whole.shape, P_x), "input")
    assert_parameter_gradients(sequential, layers, owned)


@distributed(ranks=2)
def test_gradients_of_any_strides(P_world: Partition) -> None:
    """Blocks in channels-last order, and cotangents that are expanded."""
    P_x = grid(P_world, [1, 1, 2, 1])
    sequential, layer = build_both(
        lambda: torch.nn.Conv2d(3, 4, 3, padding=1, dtype=F64),
        lambda: DistributedConv2d(P_x, 3, 4, 3, padding=1, dtype=F64),
        owner(P_x, (1, 1)),
    )
    whole = random_like_all((2, 3, 6, 7), 1).requires_grad_()
    sequential(whole).sum().backward()
    where = own_slices(whole.shape, P_x)
    for form in (torch.channels_last, torch.contiguous_format):
        block = own_block(whole, P_x).detach().contiguous(memory_format=form).requires_grad_()
        layer.zero_grad()
        with blocks_of_any_size():
            layer(block).sum().backward()
        assert_block_of(block.grad, gradient_of(whole), where, "input gradient")
        assert_parameter_gradients(sequential, layer, owner(P_x, (1, 1)))
    assert has_faces(layer)


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=2, transports=["loopback"])
def test_autocast(P_world: Partition, replicate: bool) -> None:
    """A block is cast to the dtype of the products and used in place, unless parameters move."""
    P_x = grid(P_world, [1, 1, 2])
    torch.manual_seed(P_world.rank or 0)
    x = torch.randn(2, 2, 8)
    for dtype in (torch.bfloat16, torch.float32):
        results: list[list[torch.Tensor]] = []
        for overlap in (True, False):
            torch.manual_seed(1)
            options: Any = {"replicate_parameters": replicate, "overlap": overlap}
            layer = DistributedConv1d(P_x, 2, 3, 3, padding=1, **options)
            block = x.to(dtype).requires_grad_()
            with blocks_of_any_size(), torch.autocast("cpu", torch.bfloat16):
                y = layer(block)
            assert ("Handwritten" in type(y.grad_fn).__name__) == (overlap and replicate)
            assert y.dtype == torch.bfloat16
            y.sum().backward()
            assert gradient_of(layer.weight).dtype == torch.float32
            results.append([y, gradient_of(block), *map(gradient_of, layer.parameters())])
        for ours, copied in zip(*results, strict=True):
            torch.testing.assert_close(ours, copied, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("agreement", [{"shape": "dynamic"}, {"global_shape": (2, 3, 8, 6)}])
@distributed(ranks=4, transports=["loopback"])
def test_other_agreements(P_world: Partition, agreement: dict[str, Any]) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    check(P_x, 3, 4, 3, padding=1, shape=(2, 3, 8, 6), agreement=agreement)
