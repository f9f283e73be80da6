"""Combinations of layers, operators and losses, and whether their gradients are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from gpudist import invariant_sum
from gpudist.nn import (
    ColumnParallelLinear,
    DistributedCrossEntropyLoss,
    DistributedMSELoss,
    RowParallelLinear,
    VocabParallelCrossEntropyLoss,
    invariant_copy,
    invariant_gather,
    invariant_scatter,
    invariant_share,
)
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.nn.tensor_parallel.conventions import Expectation
from gpudist.nn.tensor_parallel.region import TensorRegion
from gpudist.sbp import Placement, broadcast, to_global
from gpudist.world.partition import Partition
from tests.nn.compare import gradient_of, random_like_all
from tests.nn.tensor_parallel.parallel_cases import F64, gradient_of_copies, leaf

TOKENS, FEATURES, INNER, CLASSES = 7, 3, 5, 4
Outcome = Literal["right", "refused", "wrong, unseen"]
DUAL, SPLIT = {"convention": "dual"}, {"sequence_dim": 0}
WHOLE = {"gather_output": True}


class Row(NamedTuple):
    """A combination.

    Attributes:
        outcome: what the table of the documentation says.
        up, down: options of a column- and of a row-parallel layer.
        loss: of their output.
        head: options of a column-parallel layer behind them, if there is one.
        between: what is done to its input.
    """

    outcome: Outcome
    up: dict[str, Any]
    down: dict[str, Any]
    loss: Callable[..., torch.Tensor]
    head: dict[str, Any] | None = None
    between: Callable[..., torch.Tensor] | None = None


def of_whole(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return F.mse_loss(y, t)


def of_share(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return F.mse_loss(invariant_share(y, P), t)


def divided(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return F.mse_loss(y, t) / P.size


def summed(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return invariant_sum(F.mse_loss(y, t) / P.size, P)


def distributed_loss(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    """Loss of copies, whose mean is the mean of the whole."""
    return gives(DistributedMSELoss(P))(y, t)


def of_copy(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return distributed_loss(invariant_copy(y, P), t, P, gives)


def of_share_distributed(
    y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any
) -> torch.Tensor:
    return distributed_loss(invariant_share(y, P), t, P, gives)


def of_scattered(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return distributed_loss(invariant_scatter(y, P, 0), own(t, 0, P), P, gives)


def of_tokens(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return distributed_loss(y, own(t, 0, P), P, gives)


def of_features(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return distributed_loss(y, own(t, 1, P), P, gives)


def of_gathered(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return F.mse_loss(invariant_gather(y, P, 0), t)


def sum_of_tokens(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return invariant_sum((y - own(t, 0, P)).square().sum() / t.numel(), P)


def own_tokens_alone(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return (y - own(t, 0, P)).square().mean()


def cross_entropy(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return F.cross_entropy(y, t.argmax(1))


def vocab_parallel(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return gives(VocabParallelCrossEntropyLoss(P))(y, t.argmax(1))


def split_classes(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    grid = P.create_cartesian_topology_partition([1, P.size])
    return gives(DistributedCrossEntropyLoss(grid))(y, t.argmax(1))


def tokens_of_loss(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    loss = VocabParallelCrossEntropyLoss(P, reduction="none")
    return gives(loss)(y, t.argmax(1)).mean()


def global_loss(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    """Loss of a global tensor made of the copies."""
    placement = Placement.of(P.create_cartesian_topology_partition([P.size]))
    y, t = (to_global(each, placement, [broadcast]) for each in (y, t))
    return F.mse_loss(y, t)


def global_of_copy(y: torch.Tensor, t: torch.Tensor, P: Partition, gives: Any) -> torch.Tensor:
    return global_loss(invariant_copy(y, P), t, P, gives)


def own(t: torch.Tensor, dim: int, P: Partition) -> torch.Tensor:
    return t.tensor_split(P.size, dim)[P.rank or 0]


ROWS = {
    "whole, torch": Row("right", {}, {}, of_whole),
    "whole, distributed": Row("refused", {}, {}, distributed_loss),
    "whole, copy, distributed": Row("right", {}, {}, of_copy),
    "whole, scatter, distributed": Row("right", {}, {}, of_scattered),
    "whole, global": Row("refused", {}, {}, global_loss),
    "whole, copy, global": Row("right", {}, {}, global_of_copy),
    "dual, global": Row("right", DUAL, DUAL, global_loss),
    "whole, own sum": Row("refused", {}, {}, summed),
    "tokens, distributed": Row("right", SPLIT, SPLIT, of_tokens),
    "tokens, own sum": Row("right", SPLIT, SPLIT, sum_of_tokens),
    "tokens, gather, torch": Row("right", SPLIT, SPLIT, of_gathered),
    "tokens, torch": Row("wrong, unseen", SPLIT, SPLIT, own_tokens_alone),
    "classes, vocabulary": Row("right", {}, {}, vocab_parallel, {}),
    "classes, no mean": Row("right", {}, {}, tokens_of_loss, {}),
    "classes, distributed": Row("right", {}, {}, split_classes, {}),
    "features, distributed": Row("right", {}, {}, of_features, {}),
    "all classes, torch": Row("right", {}, {}, cross_entropy, WHOLE),
    "all classes, vocabulary": Row("refused", {}, {}, vocab_parallel, WHOLE),
    "all classes, distributed": Row("refused", {}, {}, split_classes, WHOLE),
    "dual, torch": Row("wrong, unseen", DUAL, DUAL, of_whole),
    "dual, divided": Row("right", DUAL, DUAL, divided),
    "dual, share, torch": Row("right", DUAL, DUAL, of_share),
    "dual, distributed": Row("right", DUAL, DUAL, distributed_loss),
    "dual, own sum": Row("right", DUAL, DUAL, summed),
    "dual, share, distributed": Row("refused", DUAL, DUAL, of_share_distributed),
    "dual, copy, distributed": Row("refused", DUAL, DUAL, of_copy),
    "dual, classes, vocabulary": Row("right", DUAL, DUAL, vocab_parallel, DUAL),
    "dual, then invariant": Row("refused", DUAL, DUAL, cross_entropy, WHOLE),
    "dual, share, invariant": Row("right", DUAL, DUAL, cross_entropy, WHOLE, invariant_share),
    "invariant, then dual": Row("refused", {}, {}, vocab_parallel, DUAL),
    "invariant, copy, dual": Row("right", {}, {}, vocab_parallel, DUAL, invariant_copy),
    "tokens, then dual": Row("right", SPLIT, SPLIT, vocab_parallel, DUAL | SPLIT),
    "dual tokens, then invariant": Row(
        "right", DUAL | SPLIT, DUAL | SPLIT, cross_entropy, WHOLE | SPLIT
    ),
    "dual columns, invariant rows": Row("right", DUAL, {}, of_whole),
    "invariant columns, dual rows": Row("right", {}, DUAL, of_share),
}


class Network(nn.Module):
    def __init__(
        self, up: nn.Module, down: nn.Module, head: nn.Module | None, between: Any
    ) -> None:
        super().__init__()
        self.up, self.down, self.head, self.between = up, down, head, between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).tanh()).tanh()
        if self.between is not None:
            y = self.between(y)
        return y if self.head is None else self.head(y)


def sequential_network(has_head: bool) -> Network:
    torch.manual_seed(3)
    sizes = (FEATURES, INNER), (INNER, CLASSES), (CLASSES, CLASSES)
    up, down, head = (nn.Linear(*size, dtype=F64) for size in sizes)
    return Network(up, down, head if has_head else None, None)


def parallel_network(P: Partition, row: Row) -> Network:
    torch.manual_seed(3)
    up = ColumnParallelLinear(P, FEATURES, INNER, dtype=F64, **row.up)
    down = RowParallelLinear(P, INNER, CLASSES, dtype=F64, **row.down)
    given = row.between
    between = None if given is None else lambda y: given(y, P)
    head = None
    if row.head is not None:
        head = ColumnParallelLinear(P, CLASSES, CLASSES, dtype=F64, **row.head)
    return Network(up, down, head, between)


def unchecked(module: Any) -> Any:
    """Call a module without the check of conventions."""
    for part in module.modules():
        if isinstance(getattr(part, "region", None), TensorRegion):
            part.region._copies = part.region._parts = lambda *_: None
        if hasattr(part, "_expectation"):
            part._expectation = lambda *_: None
    return module


def leave_functions_unchecked(P: Partition, but: bool) -> None:
    names = [f"invariant_{name}" for name in ("copy", "sum", "gather", "scatter", "share")]
    for name in (*names, "to_global"):
        key: Any = Expectation, name
        P.wire.remembered[key] = (lambda *_: None) if but else Expectation(*arguments(key[1]))


def arguments(name: str) -> Any:
    return name, "invariant" if name in ("invariant_copy", "invariant_scatter") else "dual"


def is_right(P: Partition, row: Row, checked: bool) -> bool:
    """All gradients are the sequential ones."""
    leave_functions_unchecked(P, not checked)
    alone, network = sequential_network(row.head is not None), parallel_network(P, row)
    if not checked:
        unchecked(network)
    whole, target = leaf(random_like_all((TOKENS, FEATURES), 1)), random_like_all((TOKENS, 4), 2)
    by_classes = row.loss in (cross_entropy, vocab_parallel, split_classes, tokens_of_loss)
    (cross_entropy if by_classes else of_whole)(alone(whole), target, P, None).backward()
    splits = "sequence_dim" in row.up
    x = leaf(own(whole, 0, P) if splits else whole)
    row.loss(network(x), target, P, (lambda y: y) if checked else unchecked).backward()
    if splits:
        pairs = [(gradient_of(x), own(gradient_of(whole), 0, P))]
    else:
        pairs = [
            (gradient_of_copies(x, row.up.get("convention", "invariant"), P), gradient_of(whole))
        ]
    placed = placements(network)
    for name, parameter in network.named_parameters():
        box = placed[name].own_box
        assert box is not None
        pairs.append((gradient_of(parameter), gradient_of(alone.get_parameter(name))[box.slices]))
    close = [bool(torch.allclose(a, b, rtol=1e-10, atol=1e-12)) for a, b in pairs]
    return all(min(rank) for rank in P.allgather_data([int(all(close))]))
