"""One sum of the gradients of a whole network, in place of one for each layer."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.nn.parameter_layer import ParameterLayer
from gpudist.nn.replication import copies_of
from gpudist.partition import Partition


def fuse_gradient_sums(network: torch.nn.Module, P: Partition | None = None) -> torch.nn.Module:
    """Sum the gradients of all replicated parameters of ``network`` together.

    Otherwise each layer sums its own. The sums come last in the backward of each forward of
    ``network``. Under torch.compile, every gradient is summed on its own.

    Args:
        network: holds distributed layers made with ``replicate_parameters=True``. All ranks have
            the same modules, in the same order.
        P: the workers on each of which modules of ``network`` that are not distributed, such as
            ``torch.nn.PReLU``, work on blocks of their own: the gradients of their parameters are
            summed over ``P`` too. Not within one graph of torch.compile.

    Returns:
        ``network``, with hooks on its forward.

    Cost:
        Backward, one group of messages for each set of workers that hold the same parameters and
        each dtype, instead of one or more for each layer.
    """
    if P is not None and P.active and P.size > 1:
        holders = P.world.create_partition_inclusive(sorted(P.ranks))
    else:
        holders = None
    network.register_forward_pre_hook(partial(_hand_out, P is not None, holders))
    network.register_forward_hook(_take_back, always_call=True)
    return network


class _Lent(NamedTuple):
    """A parameter of a module, in whose place a copy is."""

    module: torch.nn.Module
    name: str
    parameter: torch.nn.Parameter


def _hand_out(
    with_others: bool, holders: Partition | None, network: torch.nn.Module, inputs: object
) -> None:
    """Give every module its share of one node's outputs."""
    if is_dynamo_compiling():
        if with_others:
            # Without fullgraph=True, a break in the graph: this is carried out eagerly.
            raise NotImplementedError(
                "fuse_gradient_sums: the gradients of modules that are not distributed cannot be "
                "summed in a graph of torch.compile; leave out P, or compile parts of the network"
            )
        return
    if not torch.is_grad_enabled():
        return
    layers = [
        layer
        for layer in network.modules()
        if isinstance(layer, ParameterLayer)
        and layer.replicate_parameters
        and layer._copies is None
    ]
    lent = _parameters_of_others(network) if with_others else []
    copies = copies_of(
        [*(p for layer in layers for p in layer._own), *(one.parameter for one in lent)],
        [*(P for layer in layers for P in layer._holders), *(holders,) * len(lent)],
    )
    for layer in layers:
        count = len(layer._holders)
        layer._copies, copies = copies[:count], copies[count:]
    for (module, name, _), copy in zip(lent, copies, strict=True):
        module._parameters[name] = copy  # pyright: ignore[reportArgumentType]
    network.__dict__["_handed_out"] = layers, lent


def _parameters_of_others(network: torch.nn.Module) -> list[_Lent]:
    """Those of modules that are not distributed, unless a network around has lent them already."""
    return [
        _Lent(module, name, parameter)
        for module in network.modules()
        if not isinstance(module, ParameterLayer)
        for name, parameter in module._parameters.items()
        if isinstance(parameter, torch.nn.Parameter)
    ]


def _take_back(network: torch.nn.Module, inputs: object, output: object) -> None:
    layers, lent = network.__dict__.pop("_handed_out", ((), ()))
    for layer in layers:
        layer._copies = None
    for module, name, parameter in lent:
        module._parameters[name] = parameter
