"""Random networks of tensor-parallel and plain layers, beside the sequential ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from gpudist import invariant_sum
from gpudist.errors import ConventionError
from gpudist.nn import (
    ColumnParallelLinear,
    DistributedMSELoss,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelCrossEntropyLoss,
    VocabParallelEmbedding,
    fuse_parameter_movements,
    invariant_gather,
    invariant_scatter,
    invariant_share,
)
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.nn.tensor_parallel.region import Convention
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import gradient_of, random_like_all
from tests.nn.tensor_parallel.parallel_attention_cases import EMBED, HEAD, Attention
from tests.nn.tensor_parallel.parallel_cases import CONVENTIONS, F64

ROWS, CLASSES = 7, 5
Kind = Literal["mlp", "attention"]


@dataclass(frozen=True)
class Stage:
    """A residual block, or one without, of a convention of its own.

    Attributes:
        inner: features of a multilayer perceptron, or query heads for each key head.
        sizes: cuts of the inner features, as shares of them.
        moves: the sequence is cut or put together in front of it.
        shares: its input is passed through ``invariant_share``.
    """

    kind: Kind
    convention: Convention
    inner: int
    sizes: tuple[float, ...]
    has_norm: bool
    residual: bool
    moves: bool
    shares: bool


@dataclass(frozen=True)
class Case:
    """A network; everything that is drawn.

    Attributes:
        lengths: tokens of each worker.
        is_split: the sequence is cut, first.
        loss: "whole" is the one that fits its convention, "distributed" one of the library.
    """

    convention: Convention
    lengths: tuple[int, ...]
    is_split: bool
    has_embedding: bool
    stages: tuple[Stage, ...]
    head: Literal["none", "plain", "columns", "gathered"]
    loss: Literal["fitting", "distributed"]

    @property
    def is_uniform(self) -> bool:
        """Whether there is one convention without operators between, so that nothing is refused."""
        plain = all(s.convention == self.convention and not s.shares for s in self.stages)
        moves = any(s.moves for s in self.stages) and self.convention == "dual"
        return plain and not moves and self.loss == "fitting"


def draw(seed: int, workers: int) -> Case:
    chance = random.Random(seed)

    def likely(share: float) -> bool:
        return chance.random() < share

    convention: Convention = chance.choice(CONVENTIONS)
    mixes = likely(0.3)
    other = CONVENTIONS[convention == CONVENTIONS[0]]
    stages = tuple(
        Stage(
            "attention" if likely(0.4) else "mlp",
            other if mixes and likely(0.5) else convention,
            chance.randint(1, 9),
            tuple(chance.random() for _ in range(workers - 1)),
            *(likely(share) for share in (0.7, 0.6, 0.2)),
            shares=mixes and likely(0.3),
        )
        for _ in range(chance.randint(1, 3))
    )
    lengths = tuple(chance.randint(0, 3) for _ in range(workers - 1))
    head: Any = chance.choice(["none", "plain", "columns", "gathered"])
    return Case(
        convention, (*lengths, chance.randint(1, 4)), likely(0.4), likely(0.5), stages, head,
        "distributed" if likely(0.2) else "fitting",
    )  # fmt: skip


class Block(nn.Module):
    """A norm, then columns, a nonlinearity with a parameter, and rows; or attention."""

    def __init__(self, stage: Stage, body: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stage = stage
        self.norm = nn.LayerNorm(EMBED, dtype=F64) if stage.has_norm else nn.Identity()
        self.body = nn.ModuleList(body)
        self.scale = nn.PReLU(init=0.3, dtype=F64) if stage.kind == "mlp" else nn.Identity()

    def forward(self, x: torch.Tensor, lengths: Any = None) -> torch.Tensor:
        given = () if lengths is None else (lengths,)
        y = self.norm(x)
        if self.stage.kind == "mlp":
            y = self.body[1](self.scale(self.body[0](y, *given)), *given)
        elif lengths is None:
            y = self.body[0](y, None, True)
        else:
            y = self.body[0](y, None, True, lengths)
        return x + y if self.stage.residual else y.tanh()


class Network(nn.Module):
    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.head = first, nn.ModuleList(blocks), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def heads_of(stage: Stage) -> tuple[int, int]:
    return stage.inner // 2 * 2 + 2, 2


def sequential(case: Case) -> Network:
    def body(stage: Stage) -> list[nn.Module]:
        if stage.kind == "attention":
            return [Attention(*heads_of(stage))]
        sizes = (EMBED, stage.inner), (stage.inner, EMBED)
        return [nn.Linear(*size, dtype=F64) for size in sizes]

    if case.has_embedding:
        first = nn.Embedding(ROWS, EMBED, dtype=F64)
    else:
        first = nn.Linear(EMBED, EMBED, dtype=F64)
    blocks = [Block(stage, body(stage)) for stage in case.stages]
    head = nn.Identity() if case.head == "none" else nn.Linear(EMBED, CLASSES, dtype=F64)
    return Network(first, blocks, head)


class ParallelNetwork(Network):
    """Knows, as a user does, whether values are whole or blocks of tokens."""

    def __init__(self, case: Case, P: CartesianPartition) -> None:
        self.case, self.line = case, P.along([1])
        self.splits = [case.is_split]
        for stage in case.stages:
            self.splits.append(self.splits[-1] != stage.moves)
        if case.has_embedding:
            dim = 0 if case.is_split else None
            first = VocabParallelEmbedding(
                P, ROWS, EMBED, dtype=F64, convention=case.convention, sequence_dim=dim
            )
        else:
            first = nn.Linear(EMBED, EMBED, dtype=F64)
        pairs = zip(case.stages, self.splits[1:], strict=True)
        blocks = [Block(stage, self._body(stage, P, is_split)) for stage, is_split in pairs]
        head: nn.Module = nn.Identity()
        if case.head == "plain":
            head = nn.Linear(EMBED, CLASSES, dtype=F64)
        elif case.head != "none":
            head = ColumnParallelLinear(
                P, EMBED, CLASSES, dtype=F64, convention=case.convention,
                sequence_dim=0 if self.splits[-1] else None, gather_output=case.head == "gathered",
            )  # fmt: skip
        super().__init__(first, blocks, head)

    def _body(self, stage: Stage, P: CartesianPartition, is_split: bool) -> list[nn.Module]:
        options: Any = {"dtype": F64, "convention": stage.convention}
        if stage.kind == "attention":
            return [
                ParallelAttention(
                    P, EMBED, *heads_of(stage), head_dim=HEAD, split_sequence=is_split,
                    **options,
                )
            ]  # fmt: skip
        options |= {"sequence_dim": 0 if is_split else None}
        cuts = sorted(round(share * stage.inner) for share in stage.sizes)
        pairs = zip([0, *cuts], [*cuts, stage.inner], strict=True)
        sizes = [stop - start for start, stop in pairs]
        return [
            ColumnParallelLinear(P, EMBED, stage.inner, out_sizes=sizes, **options),
            RowParallelLinear(P, stage.inner, EMBED, in_sizes=sizes, **options),
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths, is_split = self.case.lengths, self.case.is_split
        if self.case.has_embedding:
            x = self.first(x, lengths) if is_split else self.first(x)
        else:
            x = self.first(self.own_tokens(x) if is_split else x)
        for block, will_be_split in zip(self.blocks, self.splits[1:], strict=True):
            if is_split and not will_be_split:
                x = invariant_gather(x, self.line, 0, lengths=lengths)
            elif will_be_split and not is_split:
                x = invariant_scatter(x, self.line, 0, lengths=lengths)
            if block.stage.shares:  # pyright: ignore
                x = invariant_share(x, self.line)
            is_split = will_be_split
            x = block(x, lengths) if is_split else block(x)
        takes = is_split and isinstance(self.head, ColumnParallelLinear)
        return self.head(x, lengths) if takes else self.head(x)

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return x.split(self.case.lengths)[self.line.rank or 0]

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Apply a loss that fits the output, or one of the library's losses."""
        case, line, P = self.case, self.line, self.line
        if case.head == "columns":
            if case.loss == "fitting":
                return VocabParallelCrossEntropyLoss(P)(y, target.argmax(1))
            return DistributedMSELoss(P)(y, target.tensor_split(P.size, 1)[line.rank or 0])
        if self.splits[-1] and case.head != "gathered":
            own = self.own_tokens(target)
            if case.loss == "distributed":
                return DistributedMSELoss(P)(y, own)
            return invariant_sum((y - own).square().sum() / target.numel(), P)
        if case.loss == "distributed":
            return DistributedMSELoss(P)(y, target)
        last = case.convention if case.head == "gathered" else case.stages[-1].convention
        return F.mse_loss(y, target) / (P.size if last == "dual" else 1)


def outcome(case: Case, P_world: Partition) -> Literal["right", "refused", "wrong"]:
    """Return the outcome of the case, with all parameters' gradients compared."""
    P = P_world.create_cartesian_topology_partition([1, P_world.size])
    torch.manual_seed(2)
    alone = sequential(case)
    torch.manual_seed(2)
    network = ParallelNetwork(case, P)
    fuse_parameter_movements(network, P)
    tokens = sum(case.lengths)
    x: torch.Tensor = random_like_all((tokens, EMBED), 1)
    if case.has_embedding:
        x = torch.arange(tokens) * 3 % ROWS
    y = alone(x)
    target = random_like_all(y.shape, 2)
    if case.head == "columns" and case.loss == "fitting":
        F.cross_entropy(y, target.argmax(1)).backward()
    else:
        F.mse_loss(y, target).backward()
    try:
        network.loss(network(x), target).backward()
    except ConventionError:
        return "refused"
    placed, close = placements(network), True
    wholes = dict(alone.named_parameters())
    for name, parameter in network.named_parameters():
        box = placed[name].own_box if name in placed else None
        expected = gradient_of(wholes[name])
        expected = expected if box is None else expected[box.slices]
        found = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        close &= bool(torch.allclose(found, expected, rtol=1e-9, atol=1e-11))
    return "right" if close else "wrong"
