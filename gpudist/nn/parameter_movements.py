"""One movement of the parameters of a whole network, in place of one or more for each layer."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.arguments import checked
from gpudist.nn.buckets import BUCKET_BYTES
from gpudist.nn.parameter_layer import ParameterLayer
from gpudist.nn.parameter_spread import copies_of_owned
from gpudist.nn.replication import copies_of
from gpudist.partition import Partition


@checked()
def fuse_parameter_movements(
    network: torch.nn.Module, P: Partition | None = None, bucket_bytes: int = BUCKET_BYTES
) -> torch.nn.Module:
    """Move the parameters of all layers of ``network`` together, and their gradients.

    Otherwise each layer moves its own. Parameters with one owner each are broadcast at the start of
    each forward of ``network``, in evaluation and without gradients too, and their gradients are
    sum-reduced at the end of its backward; so are the gradients of replicated parameters. What is
    frozen, or has no part in the output, has no gradient. A part of ``network`` that is recomputed
    for checkpointing moves its own once more. Under torch.compile, every layer moves its own.

    Copies of one-owner parameters, of all layers at once, live from the start of a forward until
    its backward has used them: every forward whose backward is still to come has its own.

    Args:
        network: holds distributed layers. All ranks have the same modules, in the same order.
        P: the workers on each of which modules of ``network`` that are not distributed, such as
            ``torch.nn.PReLU``, work on blocks of their own: the gradients of their parameters are
            summed over ``P`` too. Not within one graph of torch.compile.
        bucket_bytes: small parameters, or gradients, are copied into one message up to this many.

    Returns:
        ``network``, with hooks on its forward.

    Cost:
        Of one-owner parameters, one group of messages forward and one backward for each set of
        workers that take part in layers. Of replicated ones none forward, and backward one for each
        set of workers that hold the same parameters and each dtype. A layer alone sends one-owner
        parameters in the group of its ghosts: where all layers have ghosts, the network has one
        group more in each direction, and in all of them together fewer messages.
    """
    if P is not None and P.active and P.size > 1:
        holders = P.world.create_partition_inclusive(sorted(P.ranks))
    else:
        holders = None
    network.register_forward_pre_hook(partial(_hand_out, P is not None, holders, bucket_bytes))
    network.register_forward_hook(_take_back, always_call=True)
    return network


class _Lent(NamedTuple):
    """A parameter of a module, in whose place a copy is."""

    module: torch.nn.Module
    name: str
    parameter: torch.nn.Parameter


def _hand_out(
    with_others: bool,
    holders: Partition | None,
    bucket_bytes: int,
    network: torch.nn.Module,
    inputs: object,
) -> None:
    """Give every module its share of the outputs of one node for each placement."""
    if is_dynamo_compiling():
        if with_others:
            # Without fullgraph=True, a break in the graph: this is carried out eagerly.
            raise NotImplementedError(
                "fuse_parameter_movements: the gradients of modules that are not distributed "
                "cannot be summed in a graph of torch.compile; leave out P, or compile parts of "
                "the network"
            )
        return
    layers = [
        layer
        for layer in network.modules()
        if isinstance(layer, ParameterLayer) and layer._spreads and layer._copies is None
    ]
    lent = _parameters_of_others(network) if with_others and torch.is_grad_enabled() else []
    own = [*(p for layer in layers for p in layer._own), *(one.parameter for one in lent)]
    spreads = [*(s for layer in layers for s in layer._spreads), *(None,) * len(lent)]
    all_holders = [*(P for layer in layers for P in layer._holders), *(holders,) * len(lent)]
    copies = copies_of_owned(own, spreads, bucket_bytes)
    copies = copies_of(copies, all_holders, bucket_bytes)
    for layer in layers:
        count = len(layer._spreads)
        layer.lend(copies[:count])
        copies = copies[count:]
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
        layer.lend(None)
    for module, name, parameter in lent:
        module._parameters[name] = parameter
