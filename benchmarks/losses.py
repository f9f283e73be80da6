"""Losses, forward and backward, compared with torch's losses of the same block."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from benchmarks.case import Case, Side
from benchmarks.conv import Results, close
from benchmarks.halo import grid_of
from benchmarks.layers import block_of
from gpudist import nn
from gpudist.geometry.blocks import Decomposition
from gpudist.world.partition import Partition

IMAGE, ROWS = (4, 16, 128, 128), (4096, 256)
# At least one loss from each file of gpudist.nn's losses.
LOSSES = (
    *("CrossEntropyLoss", "NLLLoss", "MSELoss", "SmoothL1Loss", "BCEWithLogitsLoss"),
    *("HingeEmbeddingLoss", "KLDivLoss", "PoissonNLLLoss", "CosineEmbeddingLoss"),
)
OPTIONS = {"KLDivLoss": {"reduction": "batchmean"}}


def cases(ranks: int) -> list[Case]:
    """Return the cases.

    Shapes are global, images cut along spatial dims; bytes are a rank's block.
    """
    found: list[Case] = []
    for loss in LOSSES:
        is_image = loss != "CosineEmbeddingLoss"
        shape = IMAGE if is_image else ROWS
        grid = grid_of(ranks, len(IMAGE)) if is_image else (ranks, 1)
        words = [",".join(map(str, numbers)) for numbers in (shape, grid)]
        name = f"{loss}, global [{words[0]}] on [{words[1]}]"
        parameters = {"loss": loss, "shape": shape, "grid": grid}
        found.append(Case("losses", name, ranks, prod(shape) * 4 // ranks, parameters))
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the loss and the gradient of the first input."""
    name, shape = case.parameters["loss"], case.parameters["shape"]
    P_x = P_world.create_cartesian_topology_partition(case.parameters["grid"])
    torch.manual_seed(0)
    whole = arguments_of(name, shape)
    distributed = getattr(nn, f"Distributed{name}")(P_x, **OPTIONS.get(name, {}))
    sequential = getattr(torch.nn, name)(**OPTIONS.get(name, {}))
    loss, gx = both_ways(sequential, *whole)
    assert P_x.index is not None
    rows = Decomposition.balanced(shape, P_x.shape).block(P_x.index).slices
    # Tensors with one number for all channels have no channel dim.
    without = (rows[0], *rows[2:])
    own = [each[rows if each.dim() == len(shape) else without].clone() for each in whole]
    alone = both_ways(sequential, *own)
    return {
        "gpudist": Side(
            lambda: both_ways(distributed, *own),
            lambda results: are_close(results, (loss, block_of(gx, P_x))),
        ),
        "local torch": Side(
            lambda: both_ways(sequential, *own), lambda results: are_close(results, alone)
        ),
    }


def arguments_of(name: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the input and the targets of a loss."""
    x, y = torch.rand(shape), torch.rand(shape)
    labels = torch.randint(shape[1], (shape[0], *shape[2:]))
    signs = torch.randint(2, shape) * 2.0 - 1
    targets: dict[str, list[torch.Tensor]] = {
        "CrossEntropyLoss": [labels],
        "NLLLoss": [labels],
        "HingeEmbeddingLoss": [signs],
        "CosineEmbeddingLoss": [y, signs[:, 0]],
    }
    return [x, *targets.get(name, [y])]


@torch.enable_grad()
def both_ways(loss: Any, x: torch.Tensor, *targets: torch.Tensor) -> Results:
    x = x.detach().requires_grad_()
    y = loss(x, *targets)
    return y.detach(), *torch.autograd.grad(y, [x])


def are_close(results: Results, expected: Results) -> bool:
    return all(close(a, b) for a, b in zip(results, expected, strict=True))
