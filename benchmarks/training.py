"""Training steps of a network on one batch, and whether two steps agree; needs only torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

LR = 0.01
# Bound of rounding errors of float32 gradients.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Step:
    """The loss of a training step, and the gradients by the names of their parameters."""

    loss: float
    gradients: dict[str, torch.Tensor]


class Training:
    """A network, its training data, and the optimizer."""

    def __init__(
        self, network: nn.Module, criterion: nn.Module, x: torch.Tensor, target: torch.Tensor
    ) -> None:
        self._network, self._criterion = network, criterion
        self._x, self._target = x, target
        self._optimizer = torch.optim.SGD(network.parameters(), lr=LR)
        self._initial = {name: t.detach().clone() for name, t in network.state_dict().items()}

    @torch.enable_grad()
    def step(self) -> Step:
        self._optimizer.zero_grad()
        loss = self._criterion(self._network(self._x), self._target)
        loss.backward()
        self._optimizer.step()
        found = {n: p.grad for n, p in self._network.named_parameters() if p.grad is not None}
        return Step(loss.item(), found)

    @torch.no_grad()
    def start_again(self) -> None:
        """Restore the initial weights."""
        for name, t in self._network.state_dict().items():
            t.copy_(self._initial[name])


def is_right(result: Step, expected: Step) -> bool:
    """Whether the losses and gradients agree; a parameter's gradient may be on another rank."""
    return abs(result.loss - expected.loss) <= TOLERANCE * expected.loss and all(
        gradient.numel() == 0 or is_close(gradient, expected.gradients[name])
        for name, gradient in result.gradients.items()
    )


def is_close(gradient: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the norm of the difference is small relative to the norm."""
    error = torch.linalg.vector_norm(gradient - expected)
    return bool(error <= TOLERANCE * torch.linalg.vector_norm(expected))
