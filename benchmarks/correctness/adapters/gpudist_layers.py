"""Layers of ``gpudist.nn`` on blocks, with the arguments of torch's; see docs/layers.md."""

from __future__ import annotations

import inspect
import warnings
from copy import deepcopy
from typing import Any

import torch
from torch import nn

import gpudist
from benchmarks.correctness.case import Case, Layout, backward, cotangent
from benchmarks.correctness.ranks import About, NotOffered, Result
from benchmarks.environment import commit
from gpudist.checkpoint import full_state_dict, load_full_state_dict
from gpudist.world.partition import CartesianPartition

ELEMENTWISE = (nn.ReLU, nn.Tanh)


def start() -> About:
    return About(f"{gpudist.__version__}, torch {torch.__version__}", commit())


def run(case: Case, layout: Layout) -> Result:
    warnings.simplefilter("ignore")
    x, module = case.input(layout), case.module(layout)
    P_x = gpudist.init().create_cartesian_topology_partition(layout.axes_of(x.shape))
    net = layers(module, P_x).to(case.dtype).train(module.training)
    load_full_state_dict(net, module.state_dict())
    block = gpudist.scatter(x, P_x).detach().requires_grad_()
    with case.context():
        y = net(block)
    output = gpudist.all_gather(y, P_x, range(x.dim()), shape="dynamic")
    weights = gpudist.scatter(cotangent(output.shape), P_x)
    backward(case, (y * weights).sum(), block, whole=lambda gradient: gradient)
    gradient = (
        None
        if block.grad is None
        else gpudist.all_gather(block.grad, P_x, range(x.dim()), shape="dynamic")
    )
    return Result(output, gradient, _parameter_gradients(net))


def layers(module: nn.Module, P_x: CartesianPartition) -> nn.Module:
    """Return the layer that computes a module of torch, or a sequence of them."""
    if isinstance(module, nn.Sequential):
        return nn.Sequential(*(layers(each, P_x) for each in module))
    if isinstance(module, ELEMENTWISE):
        return module
    kind: Any = getattr(gpudist.nn, f"Distributed{type(module).__name__}", None)
    if kind is None or isinstance(module, nn.Linear):
        raise NotOffered  # A linear layer after others needs a repartition, which has no module.
    return kind(P_x, **_arguments(module))


def _arguments(module: nn.Module) -> dict[str, Any]:
    names = [name for name in inspect.signature(type(module)).parameters if hasattr(module, name)]
    values = {name: getattr(module, name) for name in names}
    if "bias" in inspect.signature(type(module)).parameters:
        values["bias"] = getattr(module, "bias", None) is not None
    return values


def _parameter_gradients(net: nn.Module) -> list[torch.Tensor | None]:
    of = deepcopy(net)  # Its parameters become the gradients, and are gathered as parameters are.
    with torch.no_grad():
        for parameter, copy in zip(net.parameters(), of.parameters(), strict=True):
            copy.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    gradients = full_state_dict(of, to_all=True)
    return [gradients[name] for name, _ in net.named_parameters()]
