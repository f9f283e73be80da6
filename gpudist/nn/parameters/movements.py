"""One movement of the parameters of a whole network, in place of one or more for each layer."""

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
from gpudist.nn.parameters.layer import ParameterLayer
from gpudist.nn.parameters.plain_sums import PlainSums
from gpudist.nn.parameters.replication import copies_of
from gpudist.nn.parameters.spread import copies_of_owned
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

    Otherwise each layer moves its own. Parameters with one owner each are broadcast at the start of
    each forward of ``network``, in evaluation and without gradients too, and their gradients are
    sum-reduced at the end of its backward; so are the gradients of replicated parameters. What is
    frozen, or has no part in the output, has no gradient. A part of ``network`` that is recomputed
    for checkpointing moves its own once more. Under torch.compile, every layer moves its own.

    Copies of one-owner parameters, of all layers at once, live from the start of a forward until
    its backward has used them: every forward whose backward is still to come has its own.

    Args:
        network: holds distributed layers. All ranks have the same modules, in the same order.
        P: all workers with the modules of ``network`` that are not distributed, such as
            ``torch.nn.PReLU``: the gradients of their parameters are summed over ``P`` too. Where a
            module works on invariant values of tensor-parallel layers, which have the whole
            gradient on each worker of a line, its gradients are summed over the other axes alone;
            the graph of a forward shows where. Not within one graph of torch.compile.
        bucket_bytes: small parameters, or gradients, are copied into one message up to this many.
        convention: of the values on which modules work of which the graph does not tell, because
            they are between no tensor-parallel layers.

    Returns:
        ``network``, with hooks on its forward.

    Cost:
        Of one-owner parameters, one group of messages forward and one backward for each set of
        workers that take part in layers. Of replicated ones none forward, and backward one for each
        set of workers that hold the same parameters and each dtype. A layer alone sends one-owner
        parameters in the group of its ghosts: where all layers have ghosts, the network has one
        group more in each direction, and in all of them together fewer messages. With ``P``, the
        first forward of each structure visits the nodes of its graph once.

    Raises:
        ConventionError: with ``P``, in the first forward: values of both conventions meet, a module
            works on values of both, or on values of which nothing tells and ``convention`` is not
            given; or ``P`` lacks workers that have a part of a gradient. In backward, if such a
            module is reached by another way than the outputs.
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
        partial(_hand_out, P is not None, holders, sums, bucket_bytes)
    )
    network.register_forward_hook(partial(_take_back, sums), always_call=True)
    return network


class _Lent(NamedTuple):
    """A parameter of a module, in whose place a copy is."""

    module: torch.nn.Module
    name: str
    parameter: torch.nn.Parameter


def _hand_out(
    with_others: bool,
    holders: Partition | None,
    sums: PlainSums | None,
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
    handed = _handing_node(lent, copies)
    if handed is not None and sums is not None and not sums.follows(network, handed[0]):
        handed = None
    for (module, name, _), copy in zip(lent, copies, strict=True):
        module._parameters[name] = copy  # pyright: ignore[reportArgumentType]
    network.__dict__["_handed_out"] = layers, lent, handed
    if handed is not None:
        begin_record()


def _handing_node(
    lent: Sequence[_Lent], copies: Sequence[torch.Tensor]
) -> tuple[Node, dict[int, torch.nn.Parameter]] | None:
    """The node whose outputs the copies are, and of which parameters; ``None`` if they are none."""
    pairs = [(one, copy) for one, copy in zip(lent, copies, strict=True) if not copy.is_leaf]
    if not pairs:
        return None
    return pairs[0][1].grad_fn, {copy.output_nr: one.parameter for one, copy in pairs}


def _parameters_of_others(network: torch.nn.Module) -> list[_Lent]:
    """Those of modules that are not distributed, unless a network around has lent them already."""
    return [
        _Lent(module, name, parameter)
        for module in network.modules()
        if not isinstance(module, ParameterLayer)
        for name, parameter in module._parameters.items()
        if isinstance(parameter, torch.nn.Parameter)
    ]


def _take_back(
    sums: PlainSums | None, network: torch.nn.Module, inputs: object, output: object
) -> None:
    handed_out: Any = getattr(network, "_handed_out", None)
    if handed_out is None:
        return
    del network._handed_out
    layers, lent, handed = handed_out
    for layer in layers:
        layer.lend(None)
    for module, name, parameter in lent:
        module._parameters[name] = parameter
    if handed is not None and sums is not None:
        sums.settle(network, output, end_record(), *handed)
