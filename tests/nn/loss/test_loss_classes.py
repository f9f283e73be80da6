"""Cross-entropy and negative log-likelihood, with the classes split or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gpudist
from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import Partition
from tests.nn.compare import Cut, grid, own_block, random_like_all
from tests.nn.loss.loss_cases import check, own_part
from tests.pool import distributed

F64 = torch.float64


def classes_of(shape: Sequence[int], ignored: Sequence[int] = ()) -> torch.Tensor:
    """Random targets for logits of this shape; samples at ``ignored`` are."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    target.view(-1)[list(ignored)] = -100
    return target


def weight_of(classes: int) -> torch.Tensor:
    return torch.linspace(0.5, 2, classes, dtype=F64)


@pytest.mark.parametrize("shape, sizes", [((3, 1), {0: [1, 0, 2]}), ((1, 3), None), ((2, 2), None)])
@distributed(ranks=5)
def test_the_batch_may_change(
    P_world: Partition, shape: tuple[int, int], sizes: Cut | None
) -> None:
    """A smaller last batch, split or not, needs no agreement: samples are independent."""
    P_x = grid(P_world, shape)
    loss = nn.DistributedCrossEntropyLoss(P_x)
    for batch in (7, 4, 1, 7):
        x, target = random_like_all((batch, 5), batch), classes_of((batch, 5))
        check(P_x, torch.nn.CrossEntropyLoss(), loss, [x, target])
    x, target = random_like_all((3, 5), 1), classes_of((3, 5))
    check(P_x, torch.nn.CrossEntropyLoss(), loss, [x, target], sizes)


@distributed(ranks=5, transports=["loopback"])
def test_extreme_logits(P_world: Partition) -> None:
    """Far apart, all far from 0, and minus infinity, also as a whole block of classes."""
    P_x = grid(P_world, [1, 4])
    x, target = 1e4 * random_like_all((3, 6), 1), classes_of((3, 6))
    sequential, loss = torch.nn.CrossEntropyLoss(), nn.DistributedCrossEntropyLoss(P_x)
    check(P_x, sequential, loss, [x, target])
    check(P_x, sequential, loss, [x, random_like_all((3, 6), 2).softmax(1)])
    x = 1e9 + random_like_all((3, 6), 1)
    check(P_x, sequential, loss, [x, target])
    masked = random_like_all((3, 6), 1)
    masked[:, :2], target = -torch.inf, torch.tensor([5, 3, 2])
    leaf, block = masked.clone().requires_grad_(), own_part(masked, (3, 6), P_x).requires_grad_()
    expected, value = sequential(leaf, target), loss(block, own_part(target, (3, 6), P_x))
    assert value.item() == pytest.approx(expected.item(), rel=1e-14)
    expected.backward()
    value.backward()
    assert leaf.grad is not None and block.grad is not None
    if P_x.active:
        assert torch.allclose(block.grad, own_part(leaf.grad, (3, 6), P_x), rtol=1e-14, atol=1e-16)
    unlikely = torch.zeros(3, dtype=torch.int64)
    assert loss(block, own_part(unlikely, (3, 6), P_x)).item() == torch.inf


@distributed(ranks=3, transports=["loopback"])
def test_digits_of_large_logits(P_world: Partition) -> None:
    """In float32 the largest logit would absorb the others if it were added early."""
    P_x = grid(P_world, [1, 2])
    x = 1e6 + torch.tensor([[0.0, 1.0, 0.5, 0.25]])
    target = torch.tensor([1])
    value = nn.DistributedCrossEntropyLoss(P_x)(own_part(x, x.shape, P_x), target)
    expected = torch.nn.CrossEntropyLoss()(x.double(), target)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@distributed(ranks=3, transports=["loopback"])
def test_16_bits(P_world: Partition, dtype: torch.dtype) -> None:
    """The value has torch's dtype, and is that of the same logits in float32, rounded once."""
    logits, target = random_like_all((300, 7), 1).to(dtype), classes_of((300, 7), [3])
    probabilities = random_like_all((300, 7), 2).softmax(1)
    for shape in ([3, 1], [1, 3]):
        P_x = grid(P_world, shape)
        block = own_block(logits, P_x)
        loss = nn.DistributedCrossEntropyLoss(P_x)
        value = loss(block, own_part(target, logits.shape, P_x))
        expected = torch.nn.CrossEntropyLoss()(logits.float(), target).to(dtype)
        torch.testing.assert_close(value, expected, rtol=torch.finfo(dtype).eps, atol=0)
        value.backward()
        assert block.grad is not None and block.grad.dtype == dtype
        each = nn.DistributedCrossEntropyLoss(P_x, reduction="none")
        losses = each(block, own_part(target, logits.shape, P_x)).detach()
        assert losses.dtype == dtype
        if P_x.index is not None and P_x.index[1] == 0:
            expected = torch.nn.CrossEntropyLoss(reduction="none")(logits.float(), target)
            own = own_part(expected, logits.shape, P_x).to(dtype)
            torch.testing.assert_close(losses, own, rtol=torch.finfo(dtype).eps, atol=0)
        for other in (dtype, torch.float32):
            value = loss(block, own_part(probabilities.to(other), logits.shape, P_x))
            expected = torch.nn.CrossEntropyLoss()(logits, probabilities.to(other))
            assert value.dtype == expected.dtype
            torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)
        log = own_block(logits.float().log_softmax(1).to(dtype), P_x)
        value = nn.DistributedNLLLoss(P_x)(log, own_part(target, logits.shape, P_x))
        assert value.dtype == dtype


@distributed(ranks=3, transports=["loopback"])
def test_dtypes_of_others(P_world: Partition) -> None:
    """Bytes are indices too; a wider weight widens the loss of probabilities alone."""
    P_x = grid(P_world, [1, 2])
    x, weight = random_like_all((4, 5), 1).float(), weight_of(5)
    target, probabilities = classes_of((4, 5)), random_like_all((4, 5), 2).softmax(1).float()
    own = own_part(x, x.shape, P_x)
    value = nn.DistributedCrossEntropyLoss(P_x)(own, own_part(target.byte(), x.shape, P_x))
    torch.testing.assert_close(value, torch.nn.CrossEntropyLoss()(x, target.byte()))
    loss = nn.DistributedCrossEntropyLoss(P_x, weight)
    value = loss(own, own_part(probabilities, x.shape, P_x))
    torch.testing.assert_close(value, torch.nn.CrossEntropyLoss(weight)(x, probabilities))
    value = loss(own, own_part(target, x.shape, P_x))
    torch.testing.assert_close(value, torch.nn.CrossEntropyLoss(weight.float())(x, target))


@distributed(ranks=2, transports=["loopback"])
def test_where_values_are_not_looked_at(
    P_world: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU values are not checked: an index without a class makes the loss NaN."""
    P_x = grid(P_world, [1, 2])
    weight = weight_of(4).float()
    for layer in (nn.DistributedNLLLoss, nn.DistributedCrossEntropyLoss):
        for given in (None, weight):
            loss = layer(P_x, given)
            vars(loss)["_check_classes"] = lambda *_: None
            for wrong in (-1, 4):
                target = torch.tensor([2, wrong, 1])
                assert loss(torch.randn(3, 2), target).isnan()
            assert not loss(torch.randn(3, 2), torch.tensor([2, -100, 1])).isnan()


@distributed(ranks=3, transports=["loopback"])
def test_arguments_that_are_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1])
    for smoothing in (-0.1, 1.1):
        with pytest.raises(ShapeError, match=f"label_smoothing is {smoothing}; it must be between"):
            nn.DistributedCrossEntropyLoss(P_x, label_smoothing=smoothing)
    with pytest.raises(PartitionError, match="needs an axis for the batch and one for dim 1"):
        nn.DistributedCrossEntropyLoss(grid(P_world, [2]))
    with pytest.raises(PartitionError, match="has no Cartesian topology"):
        nn.DistributedNLLLoss(P_world)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"the weight has shape \[1, 3\]; it must be \[C\]"):
        nn.DistributedNLLLoss(P_x, torch.ones(1, 3))
    for name in ("size_average", "reduce"):
        for layer in (nn.DistributedNLLLoss, nn.DistributedCrossEntropyLoss):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                layer(P_x, **{name: True})  # pyright: ignore[reportArgumentType]


INDICES, HALVES = torch.tensor([2]), torch.full((1, 4), 0.5)
REFUSED: dict[str, tuple[str, dict[str, Any], torch.Tensor, str]] = {
    "shape": ("NLLLoss", {}, torch.tensor([1, 2]), r"has shape \[2\], not \[1\]; pass this rank"),
    "kind": ("NLLLoss", {}, HALVES, r"block has shape \[1, 4\], not \[1\]"),
    "dtype": ("NLLLoss", {}, torch.tensor([1.0]), "target has dtype torch.float32; class"),
    "weight": (
        "NLLLoss",
        {"weight": torch.ones(3)},
        INDICES,
        "weight has 3 elements, but the global input has 4 classes",
    ),
    "probabilities": ("CrossEntropyLoss", {}, HALVES[:, 1:], r"shape \[1, 3\], not \[1, 4\]"),
    "integers": ("CrossEntropyLoss", {}, HALVES.long(), "probabilities must be floating point"),
    "extra dim": ("CrossEntropyLoss", {}, INDICES.view(1, 1), r"use target.squeeze\(1\)"),
    "ignored": ("CrossEntropyLoss", {"ignore_index": 0}, HALVES, "targets are probabilities"),
}


@pytest.mark.parametrize("kind", REFUSED)
@distributed(ranks=3, transports=["loopback"])
def test_a_wrong_target_on_one_rank_is_refused_everywhere(P_world: Partition, kind: str) -> None:
    """Rank 2 has no block; what is wrong on rank 1 alone ends all ranks' waits."""
    layer, options, wrong, message = REFUSED[kind]
    P_x = grid(P_world, [2, 1])
    loss = getattr(nn, f"Distributed{layer}")(P_x, **(options if P_x.rank == 1 else {}))
    x = torch.zeros(1, 4) if P_x.active else torch.zeros(0)
    target = INDICES if P_x.active else INDICES[:0]
    with pytest.raises(ShapeError, match=message):
        loss(x, wrong if P_x.rank == 1 else target)
        loss(x, target)


@distributed(ranks=2)
def test_a_target_outside_the_classes_is_refused_everywhere(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2, 1])
    criterion = nn.DistributedCrossEntropyLoss(P_x)
    target = torch.tensor([7 if P_x.rank == 1 else 2])
    with pytest.raises(ShapeError, match="target 7 is not one of the classes 0 to 3"):
        criterion(torch.randn(1, 4), target)
        criterion(torch.randn(1, 4), target)


@distributed(ranks=1, transports=["loopback"])
def test_one_worker_sends_nothing(P_world: Partition) -> None:
    """Neither do losses of global tensors, forward and backward."""
    P_x = grid(P_world, [1, 1, 1])
    network = gpudist.distribute(torch.nn.Conv1d(2, 3, 1), P_x)
    loss = nn.DistributedCrossEntropyLoss(P_x)
    x, target = torch.randn(4, 2, 5), classes_of((4, 3, 5))
    for _ in range(2):
        gpudist.stats(reset=True)
        loss(network(x), target).backward()
    assert gpudist.stats().total.calls == 0
