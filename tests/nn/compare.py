"""A distributed layer against the sequential one: values and gradients, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.cartesian import pad_left
from gpudist.world.partition import CartesianPartition, Partition

SEED = 7
Slices = tuple[slice, ...]
Cut = Mapping[int, Sequence[int]]


def grid(
    P_world: Partition, shape: Sequence[int], ranks: Sequence[int] | None = None
) -> CartesianPartition:
    """These ranks of the world, the first ones unless given, on a grid."""
    size = 1
    for extent in shape:
        size *= extent
    members = P_world.create_partition_inclusive(range(size) if ranks is None else ranks)
    return members.create_cartesian_topology_partition(shape)


def cut_of(shape: Sequence[int], P: Partition, sizes: Cut | None = None) -> Decomposition:
    """Blocks of a tensor on ``P``, axes counted from the last: balanced, or of these sizes."""
    parts = pad_left(P.shape, len(shape), 1)
    dims = [Blocks(n, p) for n, p in zip(shape, parts, strict=True)]
    for d, given in (sizes or {}).items():
        dims[d] = Blocks.of_sizes(given)
    cut = Decomposition(tuple(dims))
    assert cut.shape == tuple(shape) and cut.grid == parts
    return cut


def own_slices(shape: Sequence[int], P: Partition, sizes: Cut | None = None) -> Slices | None:
    """Return the slices of this rank's block in the global tensor; ``None`` off ``P``."""
    if P.index is None:
        return None
    return cut_of(shape, P, sizes).block(pad_left(P.index, len(shape), 0)).slices


def own_block(
    x: torch.Tensor, P: Partition, sizes: Cut | None = None, requires_grad: bool = True
) -> torch.Tensor:
    """This rank's block of a global tensor as a leaf, or the zero-volume placeholder for it."""
    where = own_slices(x.shape, P, sizes)
    block = x.new_empty((x.shape[0], 0)) if where is None else x[where]
    return block.detach().clone().requires_grad_(requires_grad)


def random_like_all(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the same random tensor on every rank, independent of earlier draws."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def assert_equal_to(
    actual: torch.Tensor | None, expected: torch.Tensor, tolerance: float, what: str
) -> None:
    assert actual is not None, f"{what}: there is none"
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def assert_block_of(
    actual: torch.Tensor | None,
    whole: torch.Tensor,
    where: Slices | None,
    what: str,
    tolerance: float = 1e-10,
) -> None:
    """``actual`` is the block of ``whole`` there, or has no cells where this rank owns none."""
    assert actual is not None, f"{what}: there is none"
    if where is None:
        assert actual.numel() == 0, f"{what}: {list(actual.shape)} on a rank without a block"
    else:
        assert_equal_to(actual, whole[where], tolerance, what)


def build_both(
    make_sequential: Callable[[], torch.nn.Module],
    make_distributed: Callable[[], torch.nn.Module],
    owned: Callable[[str, torch.Size], Slices | None],
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return both layers, drawn under one seed; assert that their values are equal."""
    torch.default_generator.manual_seed(SEED)
    sequential = make_sequential()
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(SEED)
    distributed = make_distributed()
    assert torch.equal(torch.get_rng_state(), state), "the generator has advanced differently"
    blocks = dict(distributed.named_parameters())
    wholes = dict(sequential.named_parameters())
    assert list(blocks) == list(wholes)
    for name, whole in wholes.items():
        where = owned(name, whole.shape)
        assert_block_of(blocks[name].detach(), whole.detach(), where, f"initial {name}", 0)
    return sequential, distributed


def assert_same_as_sequential(
    make_sequential: Callable[[], torch.nn.Module],
    make_distributed: Callable[[], torch.nn.Module],
    P_x: Partition,
    P_y: Partition,
    input_shape: Sequence[int],
    owned: Callable[[str, torch.Size], Slices | None] = lambda name, shape: None,
    sizes: Cut | None = None,
    output_sizes: Cut | None = None,
    x: torch.Tensor | None = None,
    tolerance: float = 1e-10,
    batches: Sequence[int] = (),
) -> None:
    """Build both layers under one seed, run them forward and backward, and compare block by block.

    Called on every rank of the world. Ranks without a block pass a placeholder that requires grad.

    Args:
        make_sequential, make_distributed: the layers.
        P_x, P_y: own the input and the output.
        input_shape: of the global input.
        owned: from a parameter's name and global shape, this rank's block of it, if any.
        sizes: of the input's blocks, per dim, where they are not balanced.
        output_sizes: of the output's.
        x: the global input, random unless given.
        tolerance: absolute and relative.
        batches: sizes of further batches for the same layers.
    """
    sequential, distributed = build_both(make_sequential, make_distributed, owned)
    for batch in (input_shape[0], *batches):
        whole = random_like_all((batch, *input_shape[1:]), SEED + batch) if x is None else x
        whole = whole.detach().clone().requires_grad_()
        block = own_block(whole, P_x, sizes)
        y_whole, y = sequential(whole), distributed(block)
        where_x, where_y = (
            own_slices(whole.shape, P_x, sizes),
            own_slices(y_whole.shape, P_y, output_sizes),
        )
        assert_block_of(y.detach(), y_whole.detach(), where_y, "output", tolerance)
        assert y.requires_grad
        cotangent = random_like_all(y_whole.shape, SEED + 1)
        backward_both(sequential, distributed, whole, block, y_whole, y, cotangent, where_y)
        assert block.grad is not None and block.grad.shape == block.shape
        assert_block_of(block.grad, gradient_of(whole), where_x, "input gradient", tolerance)
        assert_parameter_gradients(sequential, distributed, owned, tolerance)


def backward_both(
    sequential: torch.nn.Module,
    distributed: torch.nn.Module,
    whole: torch.Tensor,
    block: torch.Tensor,
    y_whole: torch.Tensor,
    y: torch.Tensor,
    cotangent: torch.Tensor,
    where_y: Slices | None,
) -> None:
    for module in (sequential, distributed):
        module.zero_grad()
    y_whole.backward(cotangent)
    y.backward(torch.zeros_like(y) if where_y is None else cotangent[where_y])


def assert_parameter_gradients(
    sequential: torch.nn.Module,
    distributed: torch.nn.Module,
    owned: Callable[[str, torch.Size], Slices | None],
    tolerance: float = 1e-10,
) -> None:
    blocks: dict[str, Any] = dict(distributed.named_parameters())
    for name, whole in sequential.named_parameters():
        where, gradient = owned(name, whole.shape), blocks[name].grad
        if where is None and gradient is None:
            continue  # a rank in none of the partitions
        assert_block_of(gradient, gradient_of(whole), where, f"gradient of {name}", tolerance)


def gradient_of(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad
