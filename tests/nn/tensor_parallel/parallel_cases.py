"""Tensor-parallel layers against sequential ones: parameters, outputs and gradients by block.

By the dual convention the gradients of a value's copies add up; by the invariant convention each of
them is the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpudist.exchange import all_reduce
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.nn.tensor_parallel.region import Convention
from gpudist.world.partition import Partition
from tests.nn.compare import SEED, assert_equal_to, gradient_of, random_like_all

F64 = torch.float64
CONVENTIONS: tuple[Convention, ...] = ("dual", "invariant")


def drawn_alike(
    make_sequential: Callable[[], torch.nn.Module], make_layer: Callable[[], torch.nn.Module]
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return both, drawn under one seed; assert that their parameters are equal by block."""
    torch.manual_seed(SEED)
    sequential = make_sequential()
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    layer = make_layer()
    assert torch.equal(torch.get_rng_state(), state), "the generator has advanced differently"
    wholes, placed = dict(sequential.named_parameters()), placements(layer)
    assert [name for name, _ in layer.named_parameters()] == list(wholes)
    for name, block in layer.named_parameters():
        assert placed[name].shape == wholes[name].shape
        box = placed[name].own_box
        if box is None:
            assert block.numel() == 0
        else:
            assert_equal_to(block.detach(), wholes[name][box.slices].detach(), 0, name)
    return sequential, layer


def assert_parameter_gradients(
    sequential: torch.nn.Module, layer: torch.nn.Module, tolerance: float = 1e-10
) -> None:
    placed, wholes = placements(layer), dict(sequential.named_parameters())
    for name, parameter in layer.named_parameters():
        box = placed[name].own_box
        if box is not None:
            expected = gradient_of(wholes[name])[box.slices]
            assert_equal_to(parameter.grad, expected, tolerance, f"gradient of {name}")


def own_range(lengths: Sequence[int], rank: int) -> slice:
    start = sum(lengths[:rank])
    return slice(start, start + lengths[rank])


def block_of(whole: torch.Tensor, dim: int, lengths: Sequence[int], rank: int) -> torch.Tensor:
    """Return the block of ``whole`` along ``dim`` of the worker ``rank``."""
    where = own_range(lengths, rank)
    return whole.narrow(dim, where.start, where.stop - where.start)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def cotangent_of_copies(
    whole: torch.Tensor, convention: Convention, P: Partition, seed: int
) -> torch.Tensor:
    """This worker's gradient for its copy of a value whose gradient is ``whole``."""
    assert P.rank is not None
    if convention == "invariant":
        return whole
    others = [random_like_all(whole.shape, seed + i) for i in range(1, P.size)]
    return others[P.rank - 1] if P.rank else whole - sum(others, torch.zeros_like(whole))


def gradient_of_copies(x: torch.Tensor, convention: Convention, P: Partition) -> torch.Tensor:
    """Return the gradient of a value, from that of this worker's copy of it."""
    return gradient_of(x) if convention == "invariant" else all_reduce(gradient_of(x), P)
