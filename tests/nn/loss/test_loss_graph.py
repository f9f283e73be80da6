"""Losses in graphs: compiled, and in forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import assert_block_of, grid, own_slices, random_like_all
from tests.nn.loss.loss_cases import own_part
from tests.pool import distributed

F64 = torch.float64
SHAPE = (4, 5)
WEIGHT = torch.linspace(0.5, 2, 5, dtype=F64)
INDICES = torch.tensor([1, 4, -100, 0])
ANY = random_like_all(SHAPE, 2)
# Options, and the tensors that follow the input.
LOSSES: dict[str, tuple[str, dict[str, Any], tuple[torch.Tensor, ...]]] = {
    "smooth l1": ("SmoothL1Loss", {}, (ANY,)),
    "huber": ("HuberLoss", {}, (ANY,)),
    "bce": ("BCELoss", {}, (ANY.sigmoid(),)),
    "bce, logits": ("BCEWithLogitsLoss", {"pos_weight": WEIGHT}, (ANY.sigmoid(),)),
    "kl": ("KLDivLoss", {"reduction": "batchmean"}, (ANY.sigmoid(),)),
    "poisson": ("PoissonNLLLoss", {}, (ANY.square(),)),
    "gauss": ("GaussianNLLLoss", {}, (ANY, ANY.square())),
    "soft margin": ("SoftMarginLoss", {}, (ANY.sign(),)),
    "hinge": ("HingeEmbeddingLoss", {}, (ANY.sign(),)),
    "nll": ("NLLLoss", {"weight": WEIGHT}, (INDICES,)),
    "indices": ("CrossEntropyLoss", {"label_smoothing": 0.1, "weight": WEIGHT}, (INDICES,)),
    "probabilities": ("CrossEntropyLoss", {}, (ANY.softmax(1),)),
    "cosine": ("CosineEmbeddingLoss", {}, (ANY, torch.tensor([1, -1, 1, -1]))),
}


def both(P_x: CartesianPartition, kind: str) -> tuple[Any, Any, torch.Tensor, tuple[Any, ...]]:
    """The loss and torch's, as functions of the input, the whole input, and this rank's targets."""
    layer, options, others = LOSSES[kind]
    own = tuple(own_part(other, SHAPE, P_x) for other in others)
    whole = random_like_all(SHAPE, 1)
    sequential = getattr(torch.nn, layer)(**options)
    distributed = getattr(nn, f"Distributed{layer}")(P_x, **options)
    whole = whole.sigmoid() if kind == "bce" else whole
    return lambda x: sequential(x, *others), distributed, whole, own


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["bce", "bce, logits", "kl", "gauss", "nll", "indices", "cosine"])
@distributed(ranks=3, transports=["host"])
def test_compiled(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 2], [2, 0])
    sequential, loss, whole, own = both(P_x, kind)
    leaf, block = whole.clone().requires_grad_(), own_part(whole, SHAPE, P_x).requires_grad_()
    torch.compiler.reset()
    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(block, *own)
    expected = sequential(leaf)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    value.square().backward()
    expected.square().backward()
    assert leaf.grad is not None
    assert_block_of(block.grad, leaf.grad, own_slices(SHAPE, P_x), "gradient", 1e-12)


@pytest.mark.parametrize("kind", LOSSES)
@distributed(ranks=3, transports=["host"])
def test_forward_mode(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 2], [2, 0])
    sequential, loss, whole, own = both(P_x, kind)
    tangent = random_like_all(SHAPE, 3)
    x, t = own_part(whole, SHAPE, P_x), own_part(tangent, SHAPE, P_x)

    def distributed(x: torch.Tensor) -> torch.Tensor:
        return loss(x, *own)

    expected = torch.func.jvp(sequential, (whole,), (tangent,))
    actual = torch.func.jvp(distributed, (x,), (t,))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    gradient = torch.func.grad(sequential)(whole)
    assert_block_of(torch.func.grad(distributed)(x), gradient, own_slices(SHAPE, P_x), "gradient")


Wrong = Callable[[CartesianPartition], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]


def wrong_probability(P_x: CartesianPartition) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    x = torch.tensor([[0.5, 2.0 if P_x.rank == 1 else 1.0]])
    return nn.DistributedBCELoss(P_x), (x, torch.ones(1, 2))


def wrong_variance(P_x: CartesianPartition) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    var = torch.tensor([[0.5, -1.0 if P_x.rank == 1 else 1.0]])
    return nn.DistributedGaussianNLLLoss(P_x), (torch.ones(1, 2), torch.ones(1, 2), var)


@pytest.mark.parametrize("make", [wrong_probability, wrong_variance])
@distributed(ranks=2, transports=["host"])
def test_wrong_values_are_refused_everywhere(P_world: Partition, make: Wrong) -> None:
    loss, tensors = make(grid(P_world, [2, 1]))
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(ShapeError, match=r"not between 0 and 1|variance is negative"):
        compiled(*tensors)
        compiled(*tensors)
