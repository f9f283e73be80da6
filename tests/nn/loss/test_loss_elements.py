"""Losses of cells: each of torch's, at ordinary and at extreme values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.fuzz.case import torch_refuses
from tests.nn.compare import Cut, grid, own_slices, random_like_all
from tests.nn.loss.loss_cases import Kind, check, own_part, sequential_of, values
from tests.pool import distributed

F64 = torch.float64


@dataclass(frozen=True)
class Element:
    """A loss, its options, what values its tensors have, and how many of them have gradients."""

    layer: str
    options: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ("any", "any")
    learned: int = 2

    def both(self, P_x: CartesianPartition, **more: Any) -> tuple[Any, Any]:
        options = {**self.options, **more}
        return sequential_of(self.layer, **options), getattr(nn, f"Distributed{self.layer}")(
            P_x, **options
        )

    def tensors(self, shape: Sequence[int]) -> list[torch.Tensor]:
        return [values(kind, shape, seed) for seed, kind in enumerate(self.kinds, 1)]


ELEMENTS: dict[str, Element] = {
    "mse": Element("MSELoss"),
    "l1": Element("L1Loss"),
    "smooth l1": Element("SmoothL1Loss"),
    "smooth l1, beta": Element("SmoothL1Loss", {"beta": 2.5}),
    "smooth l1, beta 0": Element("SmoothL1Loss", {"beta": 0.0}),
    "huber": Element("HuberLoss"),
    "huber, delta": Element("HuberLoss", {"delta": 2.5}),
    "bce": Element("BCELoss", {}, ("probability", "probability")),
    "bce, logits": Element("BCEWithLogitsLoss", {}, ("any", "probability")),
    "kl": Element("KLDivLoss", {}, ("logarithm", "probability")),
    "kl, log_target": Element("KLDivLoss", {"log_target": True}, ("logarithm", "logarithm")),
    "poisson": Element("PoissonNLLLoss", {}, ("any", "count")),
    # Torch's gradient of Stirling's term is not a number for counts of 0.
    "poisson, full": Element("PoissonNLLLoss", {"full": True}, ("any", "count"), learned=1),
    "poisson, input": Element(
        "PoissonNLLLoss", {"log_input": False, "eps": 1e-3}, ("probability", "count")
    ),
    "gauss": Element("GaussianNLLLoss", {}, ("any", "any", "variance"), learned=3),
    "gauss, full": Element(
        "GaussianNLLLoss", {"full": True, "eps": 1.5}, ("any", "any", "variance"), learned=3
    ),
    "soft margin": Element("SoftMarginLoss", {}, ("any", "sign"), learned=1),
    "hinge": Element("HingeEmbeddingLoss", {}, ("any", "sign"), learned=1),
    "hinge, margin": Element("HingeEmbeddingLoss", {"margin": 2.5}, ("any", "sign"), learned=1),
}


@distributed(ranks=3, transports=["loopback"])
def test_probabilities_of_0_and_1(P_world: Partition) -> None:
    """Torch's logarithm of 0 is -100 here, with its gradient."""
    P_x = grid(P_world, [1, 2])
    x = torch.tensor([[0, 1, 0.5, 0], [1, 0, 1, 1e-300]], dtype=F64)
    target = torch.tensor([[0, 1, 1, 1], [0, 0.5, 1, 1]], dtype=F64)
    for reduction in ("mean", "sum", "none"):
        sequential = torch.nn.BCELoss(reduction=reduction)
        loss = nn.DistributedBCELoss(P_x, reduction=reduction)  # pyright: ignore[reportArgumentType]
        leaf, block = x.clone().requires_grad_(), own_part(x, x.shape, P_x).requires_grad_()
        expected, value = sequential(leaf, target), loss(block, own_part(target, x.shape, P_x))
        if reduction != "none":
            assert value.item() == pytest.approx(expected.item(), rel=1e-14)
            assert value.item() > 1
        expected.sum().backward()
        value.sum().backward()
        where = own_slices(x.shape, P_x)
        assert leaf.grad is not None and block.grad is not None
        if where is not None:
            torch.testing.assert_close(block.grad, leaf.grad[where], rtol=1e-14, atol=0)


@pytest.mark.parametrize("kind", ["bce, logits", "poisson", "smooth l1", "huber"])
@distributed(ranks=3, transports=["loopback"])
def test_large_values(P_world: Partition, kind: str) -> None:
    element = ELEMENTS[kind]
    P_x = grid(P_world, [2, 1])
    x, target = element.tensors((4, 3))
    x = (50 * x).clamp(max=100) if kind == "poisson" else 1e4 * x
    for reduction in ("mean", "sum"):
        sequential, loss = element.both(P_x, reduction=reduction)
        check(P_x, sequential, loss, [x, target])


@distributed(ranks=3, transports=["loopback"])
def test_small_variances(P_world: Partition) -> None:
    """Below eps, and 0: taken as eps, with the gradient there."""
    P_x = grid(P_world, [2, 1])
    x, target = random_like_all((4, 3), 1), random_like_all((4, 3), 2)
    var = random_like_all((4, 3), 3).square()
    var[0, 0], var[3, 1], var[2, 2] = 0, 1e-9, torch.inf
    for eps in (1e-6, 0.3):
        sequential = torch.nn.GaussianNLLLoss(eps=eps, reduction="none")
        loss = nn.DistributedGaussianNLLLoss(P_x, eps=eps, reduction="none")
        leaf, block = var.clone().requires_grad_(), own_part(var, var.shape, P_x).requires_grad_()
        expected = sequential(x, target, leaf)
        value = loss(own_part(x, x.shape, P_x), own_part(target, x.shape, P_x), block)
        expected.sum().backward()
        value.sum().backward()
        where = own_slices(x.shape, P_x)
        assert leaf.grad is not None and block.grad is not None
        if where is not None:
            torch.testing.assert_close(value.detach(), expected.detach()[where])
            torch.testing.assert_close(block.grad, leaf.grad[where])


@distributed(ranks=5, transports=["loopback"])
def test_variances_of_other_shapes(P_world: Partition) -> None:
    """One for all, one a row, one a column: replicated along an axis that is not split."""
    x, target = random_like_all((4, 5, 3), 1), random_like_all((4, 5, 3), 2)
    sequential, P_x = torch.nn.GaussianNLLLoss(), grid(P_world, [2, 2, 1], [4, 3, 1, 0])
    loss = nn.DistributedGaussianNLLLoss(P_x)
    blocks = [own_part(each, x.shape, P_x) for each in (x, target)]
    expected = sequential(x, target, 0.7)
    torch.testing.assert_close(loss(*blocks, 0.7), expected, rtol=1e-12, atol=0)
    for shape in ((4, 5), (4, 5, 1), (1, 5, 3)):
        var = random_like_all(shape, 3).square()
        leaf = var.clone().requires_grad_()
        where = own_slices(x.shape, P_x)
        own: tuple[slice, ...] = ()
        if where is not None:
            own = tuple(s if n > 1 else slice(None) for s, n in zip(where, shape, strict=False))
        block = (var[own] if own else var[:0]).clone().requires_grad_()
        expected, value = sequential(x, target, leaf), loss(*blocks, block)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
        expected.backward()
        value.backward()
        assert leaf.grad is not None and block.grad is not None
        if shape[0] > 1 and own:
            torch.testing.assert_close(block.grad, leaf.grad[own], rtol=1e-11, atol=1e-14)
        if shape[0] == 1:
            # Copies on the workers of axis 0: their gradients add up.
            total = torch.zeros_like(var)
            if own:
                total[own] = block.grad
            total = nn.AllSumReduce(grid(P_world, [5]), [0])(total)
            torch.testing.assert_close(total, leaf.grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("layer", ["BCELoss", "BCEWithLogitsLoss"])
@distributed(ranks=5, transports=["loopback"])
def test_weights_of_cells(P_world: Partition, layer: str) -> None:
    P_x = grid(P_world, [2, 2], [4, 3, 1, 0])
    x, target = random_like_all((4, 5), 1).sigmoid(), random_like_all((4, 5), 2).sigmoid()
    where = own_slices((4, 5), P_x) or (slice(0), slice(0))
    for shape in ((4, 5), (4, 1), (5,), ()):
        weight = random_like_all((*shape, 1), 3).squeeze(-1).square()
        behind = where[2 - len(shape) :]
        own = tuple(
            slice(None) if n == 1 else s for s, n in zip(behind, shape, strict=True)
        )  # fmt: skip
        for reduction in ("mean", "sum", "none"):
            sequential = getattr(torch.nn, layer)(weight, reduction=reduction)
            loss = getattr(nn, f"Distributed{layer}")(P_x, weight[own], reduction=reduction)
            check(P_x, sequential, loss, [x, target], learned=2)


POS_WEIGHTS = [(4, 5, 3), (3,), (5, 1), (5, 3), (1, 1, 3), (1,), ()]


@pytest.mark.parametrize("sizes", [None, {0: [1, 3], 1: [5, 0], 2: [0, 3]}])
@distributed(ranks=9, transports=["loopback"])
def test_pos_weight(P_world: Partition, sizes: Cut | None) -> None:
    """Given whole, each worker takes what belongs to its block."""
    P_x = grid(P_world, [2, 2, 2], [8, 1, 2, 3, 4, 5, 7, 6])
    x, target = random_like_all((4, 5, 3), 1), random_like_all((4, 5, 3), 2).sigmoid()
    for shape in POS_WEIGHTS:
        weight = random_like_all((*shape, 1), 3).squeeze(-1).square()
        sequential = torch.nn.BCEWithLogitsLoss(pos_weight=weight)
        loss = nn.DistributedBCEWithLogitsLoss(P_x, pos_weight=weight)
        assert list(loss.state_dict()) == ["pos_weight"]
        check(P_x, sequential, loss, [x, target], sizes, learned=2)


@distributed(ranks=3, transports=["loopback"])
def test_the_batch_may_change_under_a_pos_weight(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1])
    weight = torch.linspace(0.5, 2, 3, dtype=F64)
    sequential = torch.nn.BCEWithLogitsLoss(pos_weight=weight)
    loss = nn.DistributedBCEWithLogitsLoss(P_x, pos_weight=weight)
    for batch in (5, 3, 1):
        x, target = random_like_all((batch, 3), batch), random_like_all((batch, 3), 9).sigmoid()
        check(P_x, sequential, loss, [x, target])


@distributed(ranks=3, transports=["loopback"])
def test_a_partition_without_topology(P_world: Partition) -> None:
    """It counts as a line, along the last dim."""
    P_x = P_world.create_partition_inclusive([2, 0])
    log, target = values("logarithm", (3, 4), 1), values("probability", (3, 4), 2)
    own = {2: slice(0, 1), 0: slice(1, 4)}.get(P_world.rank or 0, slice(0, 0))
    loss = nn.DistributedKLDivLoss(P_x, "batchmean")
    expected = torch.nn.KLDivLoss(reduction="batchmean")(log, target)
    torch.testing.assert_close(loss(log[:, own], target[:, own]), expected, rtol=1e-12, atol=0)


@distributed(ranks=2, transports=["loopback"])
def test_arguments_that_are_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1])
    with pytest.raises(ShapeError, match="DistributedHuberLoss: delta is 0; it must be above 0"):
        nn.DistributedHuberLoss(P_x, delta=0)
    with pytest.raises(ShapeError, match="DistributedSmoothL1Loss: beta is -1; it must be at leas"):
        nn.DistributedSmoothL1Loss(P_x, beta=-1)
    with pytest.raises(ShapeError, match="reduction is 'batchmean'; use 'mean', 'sum' or 'none'"):
        nn.DistributedMSELoss(P_x, "batchmean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="use 'mean', 'batchmean', 'sum' or 'none'"):
        nn.DistributedKLDivLoss(P_x, "average")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"pos_weight has shape \[1, 2, 3\] but P_x only 2 axes"):
        nn.DistributedBCEWithLogitsLoss(P_x, pos_weight=torch.ones(1, 2, 3))
    with pytest.raises(PartitionError, match="has no Cartesian topology"):
        nn.DistributedBCEWithLogitsLoss(P_world, pos_weight=torch.ones(3))
    for name in ("size_average", "reduce"):
        for element in ELEMENTS.values():
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                getattr(nn, f"Distributed{element.layer}")(P_x, **{name: True})


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[torch.Tensor, ...], str]] = {
    "bce input": ("BCELoss", {}, (2 * ones(1, 3), ones(1, 3)), "not between 0 and 1"),
    "bce nan": ("BCELoss", {}, (torch.nan * ones(1, 3), ones(1, 3)), "not between 0 and 1"),
    "bce target": ("BCELoss", {}, (ones(1, 3), -ones(1, 3)), "not between 0 and 1"),
    "variance": ("GaussianNLLLoss", {}, (ones(1, 3), ones(1, 3), -ones(1, 3)), "is negative"),
    "variances": (
        "GaussianNLLLoss", {}, (ones(1, 3), ones(1, 3), ones(1, 2)),
        r"variance's block has shape \[1, 2\]; it must be \[1, 3\]",
    ),
    "target": ("MSELoss", {}, (ones(1, 3), ones(1, 1)), r"block has shape \[1, 1\], not \[1, 3\]"),
    "weight": (
        "BCELoss", {"weight": ones(2)}, (ones(1, 3), ones(1, 3)),
        r"the weight's block has shape \[2\], which cannot be broadcast to \[1, 3\]",
    ),
    "pos_weight": (
        "BCEWithLogitsLoss", {"pos_weight": ones(2)}, (ones(1, 3), ones(1, 3)),
        r"pos_weight has shape \[2\], which cannot be broadcast to the global input's \[1, 3\]",
    ),
    "dims": (
        "KLDivLoss", {"reduction": "batchmean"}, (ones(3), ones(3)),
        r"the block has 1 dims but P_x has 2 axes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@distributed(ranks=3, transports=["loopback"])
def test_a_wrong_block_on_one_rank_is_refused_everywhere(P_world: Partition, kind: str) -> None:
    """Rank 2 has no block; what is wrong on rank 1 alone ends all ranks' waits."""
    layer, options, wrong, message = REFUSED[kind]
    # A pos_weight is agreed on by those who hold the same columns.
    P_x = grid(P_world, [2, 1])
    count = 3 if layer == "GaussianNLLLoss" else 2
    right = [torch.full((1, 3), 0.5)] * count
    only_here = P_x.rank == 1
    if not only_here and layer == "BCELoss":
        options = {}
    loss = getattr(nn, f"Distributed{layer}")(P_x, **options)
    if not P_x.active:
        right = [each[:0] for each in right]
    elif kind == "pos_weight":
        right = list(wrong)
    with pytest.raises(ShapeError, match=message):
        loss(*(wrong if only_here else right))
        loss(*right)


@distributed(ranks=3, transports=["loopback"])
def test_a_loss_of_integers_is_refused(P_world: Partition) -> None:
    loss = nn.DistributedL1Loss(grid(P_world, [2, 1]))
    with pytest.raises(ShapeError, match=r"losses of torch\.int64 have no gradient"):
        loss(torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@distributed(ranks=3, transports=["loopback"])
def test_16_bits(P_world: Partition, dtype: torch.dtype) -> None:
    """The value and the gradient have torch's dtype, and with a wider target its wider one."""
    P_x = grid(P_world, [2, 1])
    for element in ELEMENTS.values():
        tensors = [each.clamp(-4, 4) for each in element.tensors((6, 7))]
        for others in (dtype, torch.float32):
            own = [each.to(others) for each in tensors]
            own[0] = tensors[0].to(dtype)
            sequential, loss = element.both(P_x, reduction="sum")
            if others != dtype and torch_refuses(
                lambda: sequential(own[0].clone().requires_grad_(), *own[1:]).backward()  # noqa: B023
            ):
                continue
            expected = sequential(*own)
            blocks = [own_part(each, each.shape, P_x) for each in own]
            blocks[0].requires_grad_()
            value = loss(*blocks)
            assert value.dtype == expected.dtype, element.layer
            rtol = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol)
            value.backward()
            assert blocks[0].grad is not None and blocks[0].grad.dtype == dtype
