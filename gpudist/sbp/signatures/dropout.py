"""Dropout that drops the same cells in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.exchange.autograd import all_reduce_constant
from gpudist.geometry.boxes import Box
from gpudist.geometry.layout import broadcast, partial_sum, split
from gpudist.nn.random.cells import Cells, Key
from gpudist.nn.random.drop import drop_by_index
from gpudist.nn.random.replays import replays_on
from gpudist.sbp.call import Call, Compute
from gpudist.sbp.registry import SbpSignature, Where, compose, register
from gpudist.sbp.scope import Draws, current_draws, mix
from gpudist.sbp.signatures.channel_norms import call_rule
from gpudist.world.partition import CartesianPartition


def next_draw() -> Draws | None:
    """Count one draw of the converted network, on every rank alike, and return its state."""
    draws = current_draws()
    if draws is not None:
        draws.draws += 1
    return draws


def key_of(draws: Draws, device: torch.device) -> Key:
    """Return the key of the current draw.

    In a CUDA graph, the number is that of the replay, and the seed that of the draw.
    """
    if device.type == "cuda":
        replay = replays_on(device, draws.replays).number()
        if replay is not None:
            return Key(mix(draws.seed, draws.draws), replay)
    return Key(draws.seed, draws.draws)


def key_of_draw(P: CartesianPartition, device: torch.device) -> Key:
    """Return the key of this draw, the same on all workers.

    In a converted network, it has the network's seed and draw number, without a message.
    Elsewhere, the first worker draws a seed from torch's default CPU generator and broadcasts it.
    """
    draws = current_draws()
    if draws is not None:
        return key_of(draws, device)
    drawn = torch.randint(1 << 62, (1,))
    drawn = (drawn if P.rank == 0 else torch.zeros_like(drawn)).to(device)
    seed = all_reduce_constant(drawn, P, "sum")[0]
    return Key(seed, torch.zeros((), dtype=torch.int64, device=device))


def drop_cells(input: Tensor, p: float, leading: int, is_alpha: bool) -> Tensor:
    """Placeholder for ``drop_by_index``, which each worker computes on its block."""
    return input.clone()


@register(drop_cells, replicable=False, any_cuts=True, draws_anew=True)
def dropout_of_blocks(call: Call, parts: int) -> list[SbpSignature]:
    """Keep the attribute of the input, whatever it is."""
    attributes = [*(split(d) for d in range(call.tensors[0].dims)), broadcast]
    if not call.args[3]:
        attributes.append(partial_sum)
    return [
        SbpSignature((attribute,), (attribute,), bind=_bind_dropout) for attribute in attributes
    ]


def _bind_dropout(call: Call, where: Where) -> Compute:
    _, p, leading, is_alpha = call.args
    cells = Cells.leading(where.inputs[0], where.call.shapes[0], leading)

    def compute(tensors: Sequence[Tensor]) -> Tensor:
        x = tensors[0]
        return drop_by_index(x, key_of_draw(where.P, x.device), cells, p, is_alpha)

    return compute


def check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def drop(
    input: Tensor, p: float, training: bool, inplace: bool, leading: int, is_alpha: bool = False
) -> Tensor:
    """Drop cells of the ``leading`` dims; each is dropped with all its cells in the other dims."""
    check_probability(p)
    if not training or p == 0:
        return input if inplace else torch.reshape(input, tuple(input.shape))
    draws = next_draw()
    if p == 1:
        y = input * 0.0
    elif hasattr(input, "placement"):
        y = call_rule(drop_cells, input, p, leading, is_alpha)
    else:
        assert draws is not None
        cells = Cells.leading(Box.whole(input.shape), input.shape, leading)
        y = drop_by_index(input, key_of(draws, input.device), cells, p, is_alpha)
    return input.copy_(y) if inplace else y


def enter_dropout(function: Any, spatial: int | None) -> None:
    """Register a function of ``torch.nn.functional``; alpha dropout by its name.

    Args:
        function: function of torch.
        spatial: number of spatial dims of the channels that are dropped as a whole, -1 for all;
            ``None`` to drop single cells.
    """
    is_alpha = "alpha" in function.__name__

    @compose(function)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        leading = input.dim()
        if spatial is not None:
            leading = 2 if spatial < 0 else input.dim() - spatial
        return drop(input, p, training, inplace, leading, is_alpha)


OF_CHANNELS = {F.dropout1d: 1, F.dropout2d: -1, F.dropout3d: 3, F.feature_alpha_dropout: -1}
for _function in (F.dropout, F.alpha_dropout, *OF_CHANNELS):
    enter_dropout(_function, OF_CHANNELS.get(_function))


def enter_of_torch(name: str) -> None:
    """Register a function with an argument ``train``; what it drops follows from its name."""
    drops_channels, is_alpha = name.startswith("feature"), "alpha" in name
    in_place = name.endswith("_")

    @compose(getattr(torch, name))
    def dropout(input: Tensor, p: float, train: bool) -> Any:
        leading = 2 if drops_channels else input.dim()
        return drop(input, p, train, in_place, leading, is_alpha)


for _name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
    enter_of_torch(_name)
    enter_of_torch(f"{_name}_")
