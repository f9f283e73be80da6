"""The two entries of the room: convert a tree of modules, or show what that would do."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from gpudist.arguments import checked
from gpudist.convert.plan import Plan
from gpudist.convert.values import Count, Extent, Extents, Whole, depends_on_tensors, resized
from gpudist.convert.walk import Walk
from gpudist.convert.weights import Skeleton
from gpudist.convert.whole_shapes import Shapes, refuse_other_blocks, shapes_by_name
from gpudist.errors import ConversionError
from gpudist.nn import fuse_parameter_movements
from gpudist.partition import CartesianPartition


@checked(ConversionError)
def distribute(
    module: torch.nn.Module,
    P_x: CartesianPartition,
    plan: Plan | None = None,
    *,
    replicate_parameters: bool = True,
    global_shape: Shapes | None = None,
) -> torch.nn.Module:
    """The same network over blocks of its input: layers become distributed, weights stay.

    Follows the forward of every module. Layers of ``torch.nn`` become the distributed ones, under
    the same names and with this worker's blocks of the weights they have now; point-wise layers and
    functions stay; functions such as ``F.max_pool2d`` become layers. Where features are flattened,
    the tensor is repartitioned first, so that the batch is split and features are not. Modules of
    other classes are kept; those whose functions must be replaced become a
    ``torch.fx.GraphModule``.

    Args:
        module: the network, with the same weights on every rank; it is not changed. The arguments
            without a default of its forward are tensors; others keep their defaults.
        P_x: owns each of these in balanced blocks, one axis per dim; channels whole.
        plan: as :func:`plan_of` gives it, edited; or ``Plan(trusted={path, ...})``.
        replicate_parameters: every worker that uses a parameter of a layer holds it, and all
            gradients are summed together at the end of backward. Otherwise one worker owns each
            block, as in the paper: less memory, and messages in every forward.
        global_shape: of the whole input; of several, a list in their order, or a dict by name. Then
            every call refuses a tensor that is not this worker's balanced block of it, such as the
            whole one. Dims that ``P_x`` does not cut, usually the batch, may differ.

    Returns:
        The converted network, on the device of ``P_x``. Its attributes ``P_x`` and ``P_y`` are the
        partitions of input and output; a loss takes the latter. Of several outputs, ``P_y`` is the
        same tuple, list or dict of partitions, with ``None`` for what is no tensor cut by one, as
        a buffer. Parameters are those of distributed layers; those of PReLU
        and of modules of other classes are whole on every worker, with the summed gradient.

    Cost:
        No message. Every layer is built, and its weights are copied once. Backward, the sums of
        :func:`~gpudist.nn.fuse_parameter_movements`.

    Raises:
        ConversionError: on every rank alike, if a module or a function is not known to be right on
            blocks; names its path, and the line of the forward.
        ShapeError: on every rank alike, if ``global_shape`` does not fit the inputs. By a call of
            the network, before any message, and from the next wait of its peers: a block is wrong.
    """
    names = _tensors_of(module)
    shapes = None if global_shape is None else shapes_by_name(global_shape, names, P_x)
    net, _ = _converted(module, P_x, plan or Plan(), replicate_parameters)
    if shapes is not None:
        refuse_other_blocks(net, P_x, shapes)
    return net


@checked(ConversionError)
def plan_of(
    module: torch.nn.Module,
    P_x: CartesianPartition,
    plan: Plan | None = None,
    *,
    replicate_parameters: bool = True,
) -> Plan:
    """What :func:`distribute` would do: a table of layers, partitions and repartitions.

    Args:
        module, P_x, plan, replicate_parameters: as :func:`distribute`.

    Returns:
        A plan to print, to edit and to pass to :func:`distribute`.

    Raises:
        ConversionError: as :func:`distribute`.
    """
    return _converted(module, P_x, plan or Plan(), replicate_parameters)[1]


def _converted(
    module: torch.nn.Module, P_x: CartesianPartition, wanted: Plan, replicate_parameters: bool
) -> tuple[torch.nn.Module, Plan]:
    _require_own_parameters(module)
    walk = Walk(wanted, P_x, replicate_parameters)
    inputs = {name: resized(P_x) for name in _tensors_of(module)}
    # Layers draw initial weights, which are not kept.
    with torch.random.fork_rng([P_x.device] if P_x.device.type == "cuda" else []):
        new, P_y = walk.convert(_with_same_tensors(module), "", **inputs)
    walk.wanted.require_followed()
    P_y = _partitions_of(P_y)
    _copy_what_is_shared(new, module, P_x.device)
    _restore_order(new, module)
    facts: dict[str, Any] = {"P_x": P_x, "P_y": P_y, "_gpudist_skeleton": Skeleton(module)}
    for name, fact in facts.items():
        setattr(new, name, fact)
    _keep_defaults(new, module, list(inputs))
    return fuse_parameter_movements(new), walk.plan


def _partitions_of(output: Any) -> Any:
    """The partitions of an output's tensors, and ``None`` for all else in it.

    Raises:
        ConversionError: it has what would be wrong on blocks, or no tensor made of the input.
    """
    values: list[Any] = []
    map_aggregate(output, values.append)
    if any(isinstance(value, Extent | Extents | Count) for value in values):
        raise ConversionError(
            "the output of the module has a size, which is that of a block and not the same on "
            "every worker; read it off the tensor outside the module"
        )
    if any(isinstance(value, Whole) and value.is_parameter for value in values):
        raise ConversionError(
            "the output of the module has a parameter, whose gradient from there would not be "
            "summed over the workers; combine it with a tensor in the forward"
        )
    # What is cut up into any number of tensors is a list of partitions by itself.
    partitions = tree_map(
        lambda value: value if isinstance(value, CartesianPartition | list) else None, output
    )
    if not depends_on_tensors(partitions):
        raise ConversionError("the output of the module does not depend on the cells of its input")
    return partitions


def _tensors_of(module: torch.nn.Module) -> list[str]:
    """The arguments of the forward that are tensors: those without a default.

    Raises:
        ConversionError: there is none, or one that has no name for the caller.
    """
    names: list[str] = []
    for name, argument in inspect.signature(module.forward).parameters.items():
        if argument.kind in (argument.VAR_POSITIONAL, argument.POSITIONAL_ONLY):
            raise ConversionError(
                f"the module: its forward takes {argument}, which has no name to be given by"
            )
        if argument.kind is not argument.VAR_KEYWORD and argument.default is argument.empty:
            names.append(name)
    if not names:
        raise ConversionError("the module: no argument of its forward is without a default")
    return names


def _keep_defaults(new: torch.nn.Module, module: torch.nn.Module, names: list[str]) -> None:
    """Have calls of ``new`` with arguments that were taken at their defaults refused."""
    arguments = list(inspect.signature(module.forward).parameters.values())
    if len(arguments) == len(names):
        return
    positional = 0
    while arguments[positional].name in names and arguments[positional].kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        positional += 1
    new.register_forward_pre_hook(partial(_refuse_others, names, positional), with_kwargs=True)


def _refuse_others(
    names: list[str], positional: int, network: torch.nn.Module, args: Any, kwargs: Any
) -> None:
    if len(args) > positional or not set(kwargs) <= set(names):
        raise ConversionError(
            f"called with {len(args)} arguments and {sorted(kwargs)} by name, but converted for "
            f"{names}; others have kept their defaults"
        )


def _require_own_parameters(module: torch.nn.Module) -> None:
    """Refuse a parameter that two modules share, whose blocks would be two parameters."""
    owners: dict[int, str] = {}
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            mine = f"{path}.{name}" if path else name
            first = owners.setdefault(id(parameter), mine)
            if first != mine:
                raise ConversionError(f"{mine}: shared with {first}, which is not supported")


def _with_same_tensors(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of the tree whose parameters and buffers are the same tensors."""
    tensors = (*module.parameters(), *module.buffers())
    memo: dict[int, Any] = {id(x): x for x in tensors}
    return copy.deepcopy(module, memo)


def _copy_what_is_shared(
    new: torch.nn.Module, original: torch.nn.Module, device: torch.device
) -> None:
    """Give ``new`` its own copy of every tensor that is still the original's."""
    theirs = {id(x) for x in (*original.parameters(), *original.buffers())}
    for child in new.modules():
        for name, x in child._parameters.items():
            if x is not None and id(x) in theirs:
                own = x.detach().clone().to(device)
                child._parameters[name] = torch.nn.Parameter(own, x.requires_grad)
        for name, x in child._buffers.items():
            if x is not None and id(x) in theirs:
                child._buffers[name] = x.detach().clone().to(device)


def _restore_order(new: torch.nn.Module, original: torch.nn.Module) -> None:
    """Have ``new`` list what the original has in the original's order, and what is added behind it.

    Optimizers number their state by that order.
    """
    converted = dict(new.named_modules(remove_duplicate=False))
    for path, module in original.named_modules(remove_duplicate=False):
        if path not in converted:
            continue
        for kind in ("_modules", "_parameters", "_buffers"):
            theirs, own = vars(module)[kind], vars(converted[path])[kind]
            added = [name for name in own if name not in theirs]
            # In place: further calls of a layer have the same dict.
            for name in [*(name for name in theirs if name in own), *added]:
                own[name] = own.pop(name)
