"""Table of the layers: what each computes, and a sample call for tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from gpudist.world.partition import CartesianPartition

Kind = TypeVar("Kind", bound="type[torch.nn.Module]")
Values = Literal["normal", "positive", "fractions", "signs", "classes"]


@dataclass(frozen=True)
class Sample:
    """Random global tensor of a sample call.

    Attributes:
        shape: global shape.
        values: standard normal numbers; positive ones, at least 0.1; numbers between 0.05 and 0.95;
            -1 and 1; or class indices below ``classes``.
        classes: number of classes.
    """

    shape: tuple[int, ...]
    values: Values = "normal"
    classes: int = 0

    def draw(self, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor, of ``dtype`` unless it holds class indices."""
        if self.values == "classes":
            return torch.randint(self.classes, self.shape, generator=generator)
        if self.values == "normal":
            return torch.randn(self.shape, generator=generator, dtype=torch.float64).to(dtype)
        x = torch.rand(self.shape, generator=generator, dtype=torch.float64)
        if self.values == "signs":
            x = (x < 0.5).double() * 2 - 1
        else:
            x = x * 0.9 + (0.1 if self.values == "positive" else 0.05)
        return x.to(dtype)


@dataclass(frozen=True)
class Layer:
    """Row of ``LAYERS``.

    Attributes:
        kind: class of the distributed layer, which takes ``P_x`` and then ``arguments``.
        function: function of torch that the layer computes.
        arguments: keyword arguments of the sample's constructor after ``P_x``.
        inputs: inputs of the sample call, all split alike by the partition.
        sequential: class of the sequential layer.
        family: family in ``gpudist.nn`` that contains the layer, such as ``"norm"``.
    """

    kind: type[torch.nn.Module]
    function: Callable[..., Any]
    arguments: dict[str, Any]
    inputs: tuple[Sample, ...]
    sequential: type[torch.nn.Module]

    def make(self, P_x: CartesianPartition) -> torch.nn.Module:
        """Return the sample's layer on ``P_x``."""
        kind: Any = self.kind
        return kind(P_x, **self.arguments)

    def make_sequential(self) -> torch.nn.Module:
        """Return the sequential layer, with the arguments that it accepts."""
        taken = inspect.signature(self.sequential).parameters
        return self.sequential(**{k: v for k, v in self.arguments.items() if k in taken})

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def family(self) -> str:
        return self.kind.__module__.split(".")[2]


LAYERS: list[Layer] = []
"""Rows of all layers of blocks, in the order in which ``gpudist.nn`` imports them."""


def layer(
    function: Callable[..., Any],
    *inputs: Sample,
    sequential: type[torch.nn.Module] | None = None,
    **arguments: Any,
) -> Callable[[Kind], Kind]:
    """Register the decorated class in ``LAYERS``, which documentation, benchmarks and tests read.

    A class without a docstring gets that of its base.

    Args:
        function, inputs, arguments: see :class:`Layer`.
        sequential: class of the sequential layer; by default torch's class of the same name without
            "Distributed".
    """

    def enter(kind: Kind) -> Kind:
        torch_layer = sequential or getattr(torch.nn, kind.__name__.removeprefix("Distributed"))
        kind.__doc__ = kind.__doc__ or inspect.getdoc(kind)
        LAYERS.append(Layer(kind, function, arguments, inputs, torch_layer))
        return kind

    return enter


def sequential_of(kind: type[torch.nn.Module]) -> Any:
    """Return the sequential class of a layer or of its base layer, else ``Module``."""
    sequential_layers = {row.kind: row.sequential for row in LAYERS}
    return next(
        (sequential_layers[each] for each in kind.__mro__ if each in sequential_layers),
        torch.nn.Module,
    )
