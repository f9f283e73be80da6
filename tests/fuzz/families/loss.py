"""Losses: one value on every rank, and the gradients of the sequential loss."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition
from tests.fuzz.case import TOLERANCE, Case, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import own_slices, random_like_all
from tests.nn.loss.loss_cases import Kind, check as check_loss, own_part, sequential_of, values

# Meaning of the tensors of a loss, and how many of them have gradients.
ELEMENTS: dict[str, tuple[tuple[Kind, ...], int]] = {
    "BCELoss": (("probability", "probability"), 2),
    "BCEWithLogitsLoss": (("any", "probability"), 2),
    "GaussianNLLLoss": (("any", "any", "variance"), 3),
    "HingeEmbeddingLoss": (("any", "sign"), 1),
    "HuberLoss": (("any", "any"), 2),
    "KLDivLoss": (("logarithm", "probability"), 2),
    "L1Loss": (("any", "any"), 2),
    "MSELoss": (("any", "any"), 2),
    "PoissonNLLLoss": (("probability", "count"), 1),
    "SmoothL1Loss": (("any", "any"), 2),
    "SoftMarginLoss": (("any", "sign"), 1),
}
CLASSES = ("CrossEntropyLoss", "NLLLoss")
LAYERS = tuple(sorted([*ELEMENTS, *CLASSES, "CosineEmbeddingLoss"]))
# Options by loss, each drawn or left out. Three of them stand for tensors: "weight" and
# "pos_weight" are numbers of trailing dims, or true; "target" chooses what the target is.
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "BCELoss": {"weight": (0, 1, 2)},
    "BCEWithLogitsLoss": {"weight": (0, 1, 2), "pos_weight": (0, 1, 2)},
    "CosineEmbeddingLoss": {"margin": (0.3, -0.5)},
    "CrossEntropyLoss": {
        "weight": (True,),
        "ignore_index": (0, 1),
        "label_smoothing": (0.1, 1.0, 1.5),
        "target": ("probabilities",),
    },
    "GaussianNLLLoss": {"full": (True,), "eps": (0.5,)},
    "HingeEmbeddingLoss": {"margin": (0.3, 2.0)},
    "HuberLoss": {"delta": (0.3, 2.0, 0.0)},
    "KLDivLoss": {"log_target": (True,)},
    "NLLLoss": {"weight": (True,), "ignore_index": (0, 1)},
    "PoissonNLLLoss": {"log_input": (False,), "full": (True,), "eps": (0.1,)},
    "SmoothL1Loss": {"beta": (0.0, 0.3, 2.0, -1.0)},
}


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = 2 if layer == "CosineEmbeddingLoss" else random.randint(2, 4)
    shape = [random.randint(1, 6) for _ in range(dims)]
    if random.random() < 0.1:
        shape[random.choice([d for d in range(dims) if d != 1])] = 0
    grid = draw_grid(random, dims, range(dims), ranks)
    reductions = ["mean", "mean", "sum", "none"]
    if layer == "KLDivLoss":
        reductions.append("batchmean")
    options: dict[str, Any] = {"reduction": random.choice(reductions)}
    for name, choices in OPTIONS.get(layer, {}).items():
        if random.random() < 0.4:
            options[name] = random.choice(choices)
    sizes = draw_sizes(random, shape, grid, range(dims))
    dtype, seed = draw_dtype(random), random.randint(0, 99)
    return Case(layer, grid, tuple(shape), options, sizes, dtype, seed)


def check(case: Case, P_world: Partition) -> None:
    P_x = scattered(P_world, case.grid, case.seed)
    dtype = getattr(torch, case.dtype)
    tensors, learned = _tensors(case)
    tensors = [each.to(dtype) if each.is_floating_point() else each for each in tensors]
    whole, own = _options(case, P_x, dtype)

    refused = torch_refuses(lambda: sequential_of(case.layer, **whole)(*tensors))
    distributed = getattr(nn, f"Distributed{case.layer}")(P_x, **own)
    if refused:
        distributed(*[own_part(each, case.shape, P_x, case.sizes) for each in tensors])
        # A worker outside waits for no rank, and so learns of no error.
        assert case.options["reduction"] == "none" and not P_x.active, "torch refuses this"
        return
    check_loss(
        P_x, sequential_of(case.layer, **whole), distributed, tensors, case.sizes, learned=learned,
        tolerance=TOLERANCE[case.dtype], twice=case.dtype == "float64",
    )  # fmt: skip


def _tensors(case: Case) -> tuple[list[torch.Tensor], int]:
    """Return the global tensors, the input first, and how many of them have gradients."""
    shape, seed = case.shape, case.seed
    if case.layer in ELEMENTS:
        kinds, learned = ELEMENTS[case.layer]
        if case.options.get("log_target"):
            kinds = ("logarithm", "logarithm")
        return [values(kind, shape, seed + i) for i, kind in enumerate(kinds)], learned
    generator = torch.Generator().manual_seed(seed)
    x, other = random_like_all(shape, seed), random_like_all(shape, seed + 1)
    if case.layer == "CosineEmbeddingLoss":
        return [x, other, torch.randint(-1, 2, shape[:1], generator=generator)], 2
    if case.options.get("target") == "probabilities":
        return [x, other.softmax(1)], 2
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    if "ignore_index" not in case.options:
        target.view(-1)[: seed % 3] = -100
    return [x, target], 1


def _options(
    case: Case, P_x: CartesianPartition, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the sequential loss and those of this rank's."""
    whole = {name: value for name, value in case.options.items() if name != "target"}
    own = dict(whole)
    for name in {"weight", "pos_weight"} & whole.keys():
        if case.layer in CLASSES:
            shape: tuple[int, ...] = case.shape[1:2]
        else:
            shape = case.shape[len(case.shape) - whole[name] :]
        # One more cell, that a shape without dims has a number too.
        weight = random_like_all((*shape, 1), case.seed + 5).squeeze(-1).square().to(dtype)
        whole[name] = own[name] = weight
        where = own_slices(case.shape, P_x, case.sizes)
        if name == "weight" and case.layer not in CLASSES and where is not None:
            own[name] = weight[where[len(where) - len(shape) :]]
    return whole, own
