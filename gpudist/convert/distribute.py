"""The entry of the room: a network of any classes on blocks of its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from gpudist.checks.arguments import checked
from gpudist.convert.inputs import Entrance, Kind, require_known
from gpudist.convert.network import Conversion, convert, copied, names_of_entries
from gpudist.convert.plan import Plan
from gpudist.errors import ConversionError
from gpudist.world.partition import CartesianPartition


@checked(ConversionError)
def distribute(
    network: torch.nn.Module,
    P_x: CartesianPartition,
    plan: Plan | None = None,
    *,
    inputs: Mapping[str, Kind | Sequence[int]] | None = None,
    methods: Sequence[str] = ("forward",),
    unknown: Literal["gather", "refuse"] = "gather",
    gather_limit_bytes: int | None = None,
    replicate_parameters: bool = True,
    global_shape: Any = None,
) -> Any:
    """The same network over blocks of its input.

    A copy of ``network`` with its own modules, names and forward, which computes on global tensors:
    their ``shape`` is that of the whole, and every function of torch is carried out by its rule for
    blocks. What is no global tensor, such as parameters, buffers and what the forward makes itself,
    is whole, the same on every worker. The gradients of parameters are summed together at the end
    of backward.

    Args:
        network: any tree of modules; it is not changed. What it was given is on every rank.
        P_x: owns the inputs that are blocks, one axis for each of their dims.
        plan: as :func:`plan_of` gives it, edited.
        inputs: by name of the argument, what decides otherwise than the number of dims: a plain
            tensor with one dim for each axis of ``P_x`` is this worker's block, any other is whole.
            ``"block"``, ``"whole"``, ``"dynamic"``, a block whose global shape is agreed on at
            every call, or the global shape of a block, which saves agreeing.
        methods: every method that is called from outside, such as ``("encode", "decode")``.
        unknown: what is done with a function without a rule: ``"gather"`` its inputs on every
            worker, with a warning, or ``"refuse"`` it.
        gather_limit_bytes: the most that is gathered for one such function; by default twice the
            largest block so far, times the workers.
        replicate_parameters: every worker holds the parameters. Otherwise the first one does, as in
            the paper, and every call broadcasts them.
        global_shape: is refused; ``inputs`` takes global shapes.

    Returns:
        The converted network, on the device of ``P_x``, of a subclass of its class. It takes
        blocks, or global tensors, and gives global tensors: ``y.to_local()`` is this worker's
        block, ``y.full_tensor()`` the whole; losses of torch take them with global targets. ``P_x``
        and ``P_y`` are the partitions of inputs and, after a call, of outputs.

    Cost:
        No message; a copy of the network. The first call derives how each function is carried out;
        later ones with the same shapes repeat it. Backward, the sums of parameters' gradients: one
        message a bucket.

    Raises:
        ConversionError: on every rank alike, if a module cannot be followed; in a call, if a
            function is refused; names the module and the line of the forward.
        ShapeError: on every rank alike, in a call, if inputs do not fit together.
    """
    if global_shape is not None:
        raise ConversionError(
            f"global_shape={global_shape!r} is no option of distribute; give the global shape of "
            f"a block by the argument's name: inputs={{{_first_name(network)!r}: (...)}}"
        )
    if unknown not in ("gather", "refuse"):
        raise ConversionError(f"unknown is {unknown!r}; it must be 'gather' or 'refuse'")
    require_python(network)
    entries = names_of_entries(network, methods)
    require_known(inputs or {}, *entries)
    made = copied(network)
    for own, theirs in zip(made.parameters(), network.parameters(), strict=True):
        keep_extras(own, theirs)
    made = made.to(P_x.device)
    entrance = Entrance(P_x, inputs or {})
    conversion = Conversion(entrance, unknown, gather_limit_bytes, replicate_parameters)
    return convert(made, conversion, methods, plan or Plan())


def keep_extras(own: torch.Tensor, theirs: torch.Tensor) -> None:
    """Give a copy of a parameter the hooks and attributes that a copy does not have."""
    for name, value in vars(theirs).items():
        vars(own).setdefault(name, value)
    for hook in (theirs._backward_hooks or {}).values():
        own.register_hook(hook)
    for hook in (theirs._post_accumulate_grad_hooks or {}).values():
        own.register_post_accumulate_grad_hook(hook)


def _first_name(network: torch.nn.Module) -> str:
    """Of the arguments of the forward."""
    return next(iter(names_of_entries(network, ["forward"])[0]), "x")


def require_python(network: torch.nn.Module) -> None:
    """Refuse modules whose forward Python does not see.

    Raises:
        ConversionError: names the first one.
    """
    for path, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(
                f"{path or 'the network'} is a {type(module).__name__}, whose forward is no Python "
                "any more; give the module of which it was made by torch.jit"
            )
