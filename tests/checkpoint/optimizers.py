"""Optimizers of the sequential and the distributed model after the same steps."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.nn.parameters.parameter_placement import placements

Kind = str
MAKERS: dict[Kind, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def stepped(kind: Kind, model: torch.nn.Module, whole: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer after two steps with random gradients independent of the layout."""
    halves = list(model.children())
    groups = [{"params": [*halves[0].parameters()]}, {"params": [*model[1:].parameters()]}]  # pyright: ignore
    optimizer = MAKERS[kind](groups)
    optimizer.param_groups[1]["lr"] = 0.3
    placed = placements(model)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        shapes = {name: p.shape for name, p in whole.named_parameters()}
        for name, parameter in model.named_parameters():
            gradient = torch.randn(shapes[name], generator=generator)
            if name in placed:
                box = placed[name].own_box
                gradient = gradient[box.slices] if box is not None else torch.empty(0)
            parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer


def new_optimizer(kind: Kind, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with the same groups and without state."""
    return MAKERS[kind]([{"params": group["params"]} for group in optimizer.param_groups])


def assert_same_optimizer(actual: Any, expected: Any, what: str = "state") -> None:
    assert type(actual) is type(expected), what
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), what
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_same_optimizer(actual[key], value, f"{what}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), what
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_optimizer(one, other, f"{what}.{i}")
    else:
        assert actual == expected, what
