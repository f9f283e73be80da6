"""Entry of the zoo: how to make one network, its inputs, and the expected result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Size = tuple[int, ...]
BATCH = 2


@dataclass(frozen=True)
class Input:
    """A whole argument of a forward, and how workers get it.

    Attributes:
        tensor: the whole one.
        dims: those that the axes of the grid cut, in their order. Without any, each worker gets
            the whole tensor, as timesteps, contexts and masks.
    """

    tensor: torch.Tensor
    dims: tuple[int, ...] = ()


Inputs = dict[str, Input]


def image(channels: int = 3, name: str = "x") -> Callable[[Size], Inputs]:
    """Return one input of ``[2, channels, *size]``, whose spatial dims are cut."""
    return lambda size: {name: cells(size, channels)}


def cells(size: Size, channels: int = 3) -> Input:
    """Normal numbers of ``[2, channels, *size]``, whose spatial dims are cut, at most two."""
    return Input(torch.randn(BATCH, channels, *size), tuple(range(2, 2 + min(len(size), 2))))


def video(frames: int, channels: int = 3, name: str = "x") -> Callable[[Size], Inputs]:
    """Return one input of ``[2, channels, frames, *size]``, cut along height and width."""
    return lambda size: {name: Input(torch.randn(BATCH, channels, frames, *size), (3, 4))}


def tokens(size: Size, vocabulary: int) -> Input:
    """Token ids of ``[2, *size]``, cut along the sequence."""
    return Input(torch.randint(vocabulary, (BATCH, *size)), (1,))


def whole(*shape: int) -> Input:
    """Normal numbers that every worker gets whole."""
    return Input(torch.randn(shape))


def numbers(high: int, *shape: int) -> Input:
    """Integers below ``high`` that every worker gets whole."""
    return Input(torch.randint(high, shape))


def forward(net: nn.Module, given: Mapping[str, torch.Tensor]) -> Any:
    """Call the network: the first argument by position, the others by name."""
    first, *others = given
    return net(given[first], **{name: given[name] for name in others})


_three_channels = image()


@dataclass(frozen=True)
class Network:
    """One network of the zoo.

    Attributes:
        name: its package and its own name, ``"timm/hiera"``.
        make: the network for inputs of that spatial size, in training mode, with random weights.
        even: spatial size of the input on grids of two and four workers.
        odd: spatial size on grids with three workers: odd where the network takes such a size;
            never a multiple of three along the first dim, so that blocks are uneven.
        inputs: the arguments of the forward, by their names, for a spatial size.
        methods: those that are called from outside.
        call: what is called with the arguments.
        classes: if not 0, the first output is ``[2, classes]`` and the loss a cross entropy.
        tolerance: largest allowed error relative to the largest number.
        why: the reason of another tolerance.
        single: its numbers are float32, because its forward casts to it and cannot mix the result
            with double weights.
        random: dropout or drop path stay on.
        learned_input: the gradient of floating inputs is compared too.
    """

    name: str
    make: Callable[[Size], nn.Module]
    even: Size
    odd: Size
    inputs: Callable[[Size], Inputs] = _three_channels
    methods: tuple[str, ...] = ("forward",)
    call: Callable[[nn.Module, Mapping[str, torch.Tensor]], Any] = forward
    classes: int = 0
    tolerance: float = 1e-9
    why: str = ""
    single: bool = False
    random: bool = False
    learned_input: bool = True

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]
