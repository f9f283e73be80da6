"""Two ways of running a network: alone on the whole input, or converted, on blocks."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import gpudist
from gpudist import sbp
from gpudist.sbp import GlobalTensor
from gpudist.world.partition import CartesianPartition
from tests.hazards.entries import Entry, Input
from tests.nn.compare import own_block

Values = dict[str, torch.Tensor]


class Subject(Protocol):
    """A network as its user holds it. Every method may be collective."""

    network: nn.Module

    def __init__(self, entry: Entry, P_x: CartesianPartition | None) -> None: ...
    def leaves(self, values: Values, with_graph: bool) -> Values:
        """Return the arguments of the network, made of the whole inputs."""
        ...

    def call(self, values: Values) -> Any: ...
    def whole(self, y: torch.Tensor) -> torch.Tensor:
        """Return a tensor of an output, whole on this worker."""
        ...

    def weighted(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of an output's cells."""
        ...

    def input_gradients(self, values: Values) -> Values: ...
    def parameter_gradient(self, p: nn.Parameter) -> torch.Tensor: ...


def made(entry: Entry) -> nn.Module:
    """Return the module, equal on all ranks."""
    torch.manual_seed(11)
    net = entry.make().double()
    # So that what people initialise with zero counts, too.
    with torch.no_grad():
        for p in net.parameters():
            if p.is_floating_point() and not p.any():
                p.add_(0.1 * torch.randn_like(p))
    return net


def call(entry: Entry, network: nn.Module, values: Values) -> Any:
    """Call ``network`` as its user does."""
    named = {each.name: values[each.name] for each in entry.inputs if each.keyword}
    return network(*[values[e.name] for e in entry.inputs if not e.keyword], **named)


def leaf(x: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    return x.detach().clone().requires_grad_(needs_grad)


class _RightNorms(TorchFunctionMode):
    """Gives torch's norms of channels a gradient with their own strides; others may be misread."""

    _norms = (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        y = func(*args, **(kwargs or {}))
        if func in self._norms and y.requires_grad:
            # Extents of 1 make odd strides contiguous, too.
            y.register_hook(lambda gradient: torch.empty_like(y).copy_(gradient))
        return y


class Alone:
    """The network itself, computed whole by every worker."""

    def __init__(self, entry: Entry, P_x: CartesianPartition | None) -> None:
        self.entry = entry
        self.network = entry.after(made(entry))

    def leaves(self, values: Values, with_graph: bool) -> Values:
        inputs = {each.name: each for each in self.entry.inputs}
        return {n: leaf(x, inputs[n].leaf and with_graph) for n, x in values.items()}

    def call(self, values: Values) -> Any:
        with _RightNorms():
            return call(self.entry, self.network, values)

    def whole(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def weighted(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return _weighted(y, weights)

    def input_gradients(self, values: Values) -> Values:
        return {n: _gradient(x) for n, x in values.items() if x.requires_grad}

    def parameter_gradient(self, p: nn.Parameter) -> torch.Tensor:
        return _gradient(p)


class Converted:
    """A network converted by ``gpudist.distribute`` and called with blocks."""

    def __init__(self, entry: Entry, P_x: CartesianPartition | None) -> None:
        assert P_x is not None, "converted for no workers"
        self.entry, self.P_x = entry, P_x
        ranks = np.array(P_x.ranks).reshape(P_x.shape)
        self.placement = gpudist.placement("cpu", ranks, P_x.world)
        axes = len(P_x.shape)
        self.copies = (sbp.broadcast,) * axes
        self.cut = tuple(sbp.split(d) for d in range(axes))
        self.is_block = {
            each.name: not each.whole and len(each.letters) == axes for each in entry.inputs
        }
        said = {e.name: self._said(e) for e in entry.inputs if len(e.letters) == axes}
        said = {name: words for name, words in said.items() if words is not None}
        self.network: nn.Module = entry.after(self.distributed(made(entry), said))

    def distributed(self, network: nn.Module, said: Any) -> nn.Module:
        """Convert the network, given what is said of its inputs."""
        return gpudist.distribute(network, self.P_x, inputs=said)

    def _said(self, each: Input) -> str | tuple[int, ...] | None:
        """Return the argument of ``distribute`` for an input that has a dim for each axis."""
        if not self.is_block[each.name]:
            return "whole"
        if self.entry.step:
            return "dynamic"
        # Blocks of one cell along all split dims could also be whole tensors: pass the global
        # shape.
        shape = each.shape(self.entry.sizes)
        parts = zip(shape, self.P_x.shape, strict=True)
        if all(n <= p for n, p in parts if p > 1):
            return shape
        # Blocks of few values may be equal by chance.
        return None if each.kind == "float" else "block"

    def leaves(self, values: Values, with_graph: bool) -> Values:
        given: Values = {}
        for each in self.entry.inputs:
            x, needs_grad = values[each.name], each.leaf and with_graph
            cut = self.is_block[each.name]
            given[each.name] = (
                own_block(x, self.P_x, None, needs_grad) if cut else leaf(x, needs_grad)
            )
        return given

    def call(self, values: Values) -> Any:
        return call(self.entry, self.network, values)

    def whole(self, y: torch.Tensor) -> torch.Tensor:
        return y.full_tensor() if isinstance(y, GlobalTensor) else y

    def weighted(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # A plain tensor in an output, such as a parameter, is a copy on each worker.
        y = y if isinstance(y, GlobalTensor) else gpudist.to_global(y, self.placement, self.copies)
        copies = (sbp.broadcast,) * y.placement.axes
        return _weighted(y, gpudist.to_global(weights, y.placement, copies))

    def input_gradients(self, values: Values) -> Values:
        """Return the whole gradients of the inputs.

        A block has a block of the gradient. For a whole input each worker has the whole gradient if
        all are equal, else a term of it.
        """
        found: Values = {}
        for n, x in values.items():
            if x.requires_grad and self.is_block[n]:
                found[n] = gpudist.to_global(_gradient(x), self.placement, self.cut).full_tensor()
            elif x.requires_grad:
                mine = _gradient(x)
                first = gpudist.to_global(mine, self.placement, self.copies).full_tensor()
                total, difference = self._sum(mine), self._sum((mine - first).abs())
                found[n] = total if difference.any() else first
        return found

    def _sum(self, mine: torch.Tensor) -> torch.Tensor:
        terms = (sbp.partial_sum,) * len(self.cut)
        return gpudist.to_global(mine, self.placement, terms).full_tensor()

    def parameter_gradient(self, p: nn.Parameter) -> torch.Tensor:
        return self.whole(_gradient(p))


def _weighted(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = (y * weights).sum()
    return total.abs() if y.is_complex() else total


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.detach()
