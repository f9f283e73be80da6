"""Convert any torch network so that it computes on blocks of its input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from gpudist.checks.arguments import checked
from gpudist.convert.converted import names_of_entries, prepare
from gpudist.convert.copies import broadcast_copies, require_buffers
from gpudist.convert.inputs import Entrance, Kind, require_known
from gpudist.convert.network import Conversion
from gpudist.convert.network_plan import NetworkPlan
from gpudist.convert.parameters import if_imported, named_tensors
from gpudist.convert.sharing import claimed, require_new
from gpudist.errors import ConversionError
from gpudist.world.partition import CartesianPartition
from gpudist.world.runtime import process_grid

_Network = TypeVar("_Network", bound=torch.nn.Module)
_WRAPPERS = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
)


@checked(ConversionError)
def distribute(
    network: _Network,
    P_x: CartesianPartition | DeviceMesh | Sequence[int],
    plan: NetworkPlan | None = None,
    *,
    inputs: Mapping[str, Kind | Sequence[int]] | None = None,
    methods: Sequence[str] = ("forward",),
    unknown: Literal["gather", "refuse"] = "gather",
    gather_limit_bytes: int | None = None,
    replicate_parameters: bool = True,
    broadcast_parameters: bool = False,
    local_buffers: Sequence[str] = (),
    global_shape: Any = None,
) -> _Network:
    """Convert a network in place so that it computes on blocks of its input, and return it.

    The network keeps its modules, names and forward, and computes on global tensors: their
    ``shape`` is the global shape, and every function of torch is computed by its rule for blocks.
    Plain tensors, such as parameters, buffers and tensors that the forward creates, are replicated:
    every worker has the same values. The gradients of all parameters are summed together at the
    end of backward.

    Parameters stay the same objects, so optimizers, schedulers and closures made before refer
    to the converted network; those of which workers hold parts become global tensors. To keep the
    sequential network, convert ``copy.deepcopy(network)``. If an error is raised, the network is as
    it was, except after the failure of another rank in a broadcast.

    Args:
        network: any tree of modules, the same on every rank, with the same weights unless
            ``broadcast_parameters`` is set. If ranks are threads, each builds its own.
        P_x: partition of the inputs that are blocks, one axis for each of their dims; or torch's
            mesh of its workers, or the shape of a grid of the first workers of the world.
        plan: result of :func:`plan_of`, with edits to apply.
        inputs: kinds of inputs by argument name, where the default does not fit. By default, a
            plain tensor with one dim for each axis of ``P_x`` is this worker's block, and any other
            is the whole tensor. Kinds are ``"block"``, ``"whole"``, ``"dynamic"`` (a block on whose
            global shape ranks agree at every call, not only without gradients), ``"split"`` (the
            whole tensor on every rank, of which each worker takes its block), or the global shape
            of a block, which saves agreeing on it.
        methods: all methods that are called from outside the network, such as
            ``("encode", "decode")``.
        unknown: treatment of functions without a rule: ``"gather"`` gathers their inputs on every
            worker, with a warning, and ``"refuse"`` raises.
        gather_limit_bytes: maximum number of bytes gathered for one such function; by default twice
            the largest block so far, times the number of workers.
        replicate_parameters: if ``True``, every worker holds the parameters. Otherwise only the
            first worker does, and every call broadcasts them, as in the paper.
        broadcast_parameters: whether to start with the parameters and buffers of the first worker
            of ``P_x`` on all of them. Otherwise the first call raises if they differ in any bit.
        local_buffers: names of buffers that may differ between the workers, such as counters that
            no output depends on; neither compared nor broadcast.
        global_shape: not supported; pass global shapes by ``inputs``.

    Returns:
        The same network, on the device of ``P_x``; its class is a subclass of the original class.
        It takes blocks or global tensors, and returns global tensors: ``y.to_local()`` is
        this worker's block, ``y.full_tensor()`` the whole tensor. torch's losses accept them with
        global targets. ``P_x`` and ``P_y`` are the partitions of the inputs and, after a call, of
        the outputs; a checker of types knows them after
        ``assert isinstance(net, gpudist.convert.Converted)``.

    Cost:
        Memory for one parameter that workers hold in parts, and no message; with
        ``broadcast_parameters``, which is collective over the world, a small all-gather and one
        broadcast of the parameters and buffers, in messages one after the other.
        The first call compares one digest of the copies of parameters and buffers, for which each
        worker reads them once, and derives how to compute each function; later calls with the same
        shapes reuse the result. Calls without gradients agree on the shapes of blocks by one small
        all-gather per input in host memory. Backward sums the gradients of parameters with one
        message per bucket.

    Raises:
        ConversionError: on every rank alike, if a module cannot be converted, or a parameter
            that workers are to hold in parts has weak references or is part of a graph; in a call,
            if a function without a rule is refused. The message names the module and the line of
            the forward.
        PlanMismatch: on every rank alike, in the first call, if the copies of a parameter or buffer
            differ; the message names the first one. With ``broadcast_parameters``, if their names,
            dtypes or shapes differ.
        ShapeError: on every rank alike, in a call, if the inputs are inconsistent, or one could be
            a block as well as the whole tensor.
    """
    if global_shape is not None:
        first = next(iter(names_of_entries(network, ["forward"])[0]), "x")
        raise ConversionError(
            f"distribute does not take global_shape={global_shape!r}; pass the global shape of a "
            f"block under its argument's name: inputs={{{first!r}: (...)}}"
        )
    if unknown not in ("gather", "refuse"):
        raise ConversionError(
            f"distribute: unknown is {unknown!r}; it must be 'gather' or 'refuse'"
        )
    P_x = process_grid(P_x)
    require_new(network, P_x)
    _require_convertible(network, P_x)
    entries = names_of_entries(network, methods)
    require_known(inputs or {}, *entries)
    require_buffers(network, local_buffers)
    entrance = Entrance(P_x, inputs or {})
    conversion = Conversion(
        entrance, unknown, gather_limit_bytes, replicate_parameters, local_buffers
    )
    convert = prepare(network, conversion, methods, plan or NetworkPlan())
    with claimed(network, conversion):
        with _restored_on_failure(network):
            network.to(P_x.device)
            if broadcast_parameters:
                broadcast_copies(network, P_x, local_buffers)
        convert()
    return network


@contextmanager
def _restored_on_failure(network: torch.nn.Module) -> Iterator[None]:
    """Leave parameters, gradients and buffers of a network where they are if an error is raised."""
    tensors = [x for p in network.parameters() for x in (p, p.grad)]
    held = [(x, x.data) for x in tensors if x is not None]
    buffers = [(module, dict(module._buffers)) for module in network.modules()]
    try:
        yield
    except BaseException:
        for x, data in held:
            x.data = data
        for module, own in buffers:
            module._buffers.update(own)
        raise


def _require_convertible(network: torch.nn.Module, P_x: CartesianPartition) -> None:
    """Raise if a module runs something else than its own forward in Python, or lacks values.

    Raises:
        ConversionError: the network contains such a module; the message names the first one.
    """
    for name, x in named_tensors(network):
        if is_lazy(x):
            raise ConversionError(
                f"distribute: {name!r} has no shape yet; call the network once before"
            )
        if x.is_meta and P_x.device.type != "meta":
            raise ConversionError(
                f"distribute: {name!r} is on the device 'meta' and has no values; call "
                f"network.to_empty(device={str(P_x.device)!r}), and load or initialize them"
            )
    wrappers = (
        torch.nn.DataParallel,
        torch.nn.parallel.DistributedDataParallel,
        *filter(None, [if_imported(room, name) for room, name in _WRAPPERS]),
    )
    for path, module in network.named_modules():
        what = f"distribute: {path or 'the network'} is a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(
                f"{what}, whose forward is not Python code; pass the module that torch.jit "
                "compiled it from"
            )
        # Compiled modules within the network are called with global tensors.
        if isinstance(module, wrappers) or (not path and hasattr(module, "_orig_mod")):
            raise ConversionError(
                f"{what}; convert the network without it, and wrap, shard or compile the result"
            )
