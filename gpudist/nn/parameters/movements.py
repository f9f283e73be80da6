"""Fused movement of all parameters of a network, in place of separate ones per layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.checks.arguments import checked
from gpudist.errors import ConventionError
from gpudist.nn.parameters.buckets import BUCKET_BYTES
from gpudist.nn.parameters.gradient_graph import Convention, Node, begin_record, end_record
from gpudist.nn.parameters.parameter_broadcast import copies_of_owned
from gpudist.nn.parameters.parameter_layer import ParameterLayer
from gpudist.nn.parameters.plain_sums import PlainSums
from gpudist.nn.parameters.replication import copies_of
from gpudist.world.partition import Partition


@checked()
def fuse_parameter_movements(
    network: torch.nn.Module,
    P: Partition | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    *,
    convention: Convention | None = None,
) -> torch.nn.Module:
    """Move the parameters of all layers of ``network`` together, and their gradients.

    Without this function, each layer moves its own parameters. With it, each forward of ``network``
    starts by broadcasting all parameters that have one owner, also in evaluation and without
    gradients. Their gradients, and those of replicated parameters, are summed at the end of
    backward. Parameters that are frozen, or that do not contribute to the output, get no gradient.
    A part of ``network`` that is recomputed for checkpointing moves its parameters once more. Under
    torch.compile, every layer moves its own.

    The copies of one-owner parameters of all layers stay allocated from the start of a forward
    until its backward has used them; every forward with a pending backward has its own copies.

    Args:
        network: network with distributed layers. All ranks have the same modules, in the same
            order.
        P: partition of all workers with the modules of ``network`` that are not distributed, such
            as ``torch.nn.PReLU``: the gradients of their parameters are summed over ``P`` too. If a
            module works on invariant values of tensor-parallel layers, which have the whole
            gradient on each worker of a line, its gradients are summed only over the other axes;
            the graph of each forward shows where. Not supported within one graph of torch.compile.
        bucket_bytes: maximum bytes of small parameters, or gradients, copied into one message.
        convention: convention to assume where the graph shows none, because a module is not between
            tensor-parallel layers.

    Returns:
        ``network``, with hooks on its forward.

    Cost:
        For one-owner parameters, one group of messages forward and one backward per set of workers
        that take part in layers. For replicated parameters, no message in forward, and one group in
        backward per dtype and set of workers that hold the same parameters. A layer alone sends its
        one-owner parameters in the same group as its ghost cells: where all layers have ghost
        cells, the network has one more group in each direction, but fewer messages in total. With
        ``P``, the first forward of each structure visits the nodes of its graph once.

    Raises:
        ConventionError: with ``P``, in the first forward: values of both conventions meet; a module
            works on values of both; a module works on values whose convention is unknown and
            ``convention`` is not given; or ``P`` lacks workers that hold a part of a gradient. In
            backward, if the gradient reaches a module of unknown convention by another way than the
            outputs.
    """
    if convention not in (None, "dual", "invariant"):
        raise ConventionError(
            f"fuse_parameter_movements: convention is {convention!r}; use 'dual' or 'invariant'"
        )
    if P is not None and P.active and P.size > 1:
        holders = P.world.create_partition_inclusive(sorted(P.ranks))
        sums = PlainSums(P, convention)
    else:
        holders = sums = None
    network.register_forward_pre_hook(
        partial(_insert_copies, P is not None, holders, sums, bucket_bytes)
    )
    network.register_forward_hook(partial(_restore_parameters, sums), always_call=True)
    return network


class _PlainParameter(NamedTuple):
    """Parameter of a module that is replaced by a copy."""

    module: torch.nn.Module
    name: str
    parameter: torch.nn.Parameter


def _insert_copies(
    with_others: bool,
    holders: Partition | None,
    sums: PlainSums | None,
    bucket_bytes: int,
    network: torch.nn.Module,
    inputs: object,
) -> None:
    """Replace all parameters by copies, the outputs of one autograd node per placement."""
    if is_dynamo_compiling():
        if with_others:
            # Without fullgraph=True, this call breaks the graph, and the hook runs eagerly.
            raise NotImplementedError(
                "fuse_parameter_movements: the gradients of modules that are not distributed "
                "cannot be summed in a graph of torch.compile; omit P, or compile parts of the "
                "network"
            )
        return
    ways = {layer: layer.ways() for layer in network.modules() if isinstance(layer, ParameterLayer)}
    layers = [layer for layer, ways_of_layer in ways.items() if ways_of_layer]
    all_ways = [way for ways_of_layer in ways.values() for way in ways_of_layer]
    plain = _parameters_of_others(network) if with_others and torch.is_grad_enabled() else []
    parameters = [
        *(way.parameter for way in all_ways),
        *(plain_parameter.parameter for plain_parameter in plain),
    ]
    broadcasts = [*(way.broadcast for way in all_ways), *(None,) * len(plain)]
    all_holders = [*(way.holders for way in all_ways), *(holders,) * len(plain)]
    copies = copies_of_owned(parameters, broadcasts, bucket_bytes)
    copies = copies_of(copies, all_holders, bucket_bytes)
    for layer in layers:
        count = len(ways[layer])
        layer.use_copies(copies[:count])
        copies = copies[count:]
    source = _copies_node(plain, copies)
    if source is not None and sums is not None and not sums.follows(network, source[0]):
        source = None
    for (module, name, _), copy in zip(plain, copies, strict=True):
        module._parameters[name] = copy  # pyright: ignore[reportArgumentType]
    network.__dict__["_copies_in_use"] = layers, plain, source
    if source is not None:
        begin_record()


def _copies_node(
    plain: Sequence[_PlainParameter], copies: Sequence[torch.Tensor]
) -> tuple[Node, dict[int, torch.nn.Parameter]] | None:
    pairs = [
        (plain_parameter, copy)
        for plain_parameter, copy in zip(plain, copies, strict=True)
        if not copy.is_leaf
    ]
    if not pairs:
        return None
    return pairs[0][1].grad_fn, {
        copy.output_nr: plain_parameter.parameter for plain_parameter, copy in pairs
    }


def _parameters_of_others(network: torch.nn.Module) -> list[_PlainParameter]:
    """Return the parameters of modules that are not distributed.

    Parameters that an enclosing network has already replaced by copies are omitted.
    """
    return [
        _PlainParameter(module, name, parameter)
        for module in network.modules()
        if not isinstance(module, ParameterLayer)
        for name, parameter in module._parameters.items()
        if isinstance(parameter, torch.nn.Parameter)
    ]


def _restore_parameters(
    sums: PlainSums | None, network: torch.nn.Module, inputs: object, output: object
) -> None:
    in_use: Any = getattr(network, "_copies_in_use", None)
    if in_use is None:
        return
    del network._copies_in_use
    layers, plain, source = in_use
    for layer in layers:
        layer.use_copies(None)
    for module, name, parameter in plain:
        module._parameters[name] = parameter
    if source is not None and sums is not None:
        sums.set_holders(network, output, end_record(), *source)
