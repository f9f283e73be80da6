"""Agreement of all ranks on an optimizer's state, before it is moved or written."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gpudist.checkpoint.conversion import convert_dtype, require_cells
from gpudist.checkpoint.json_values import decode, encode
from gpudist.checkpoint.moving import is_sharded
from gpudist.checkpoint.texts import broadcast_text, failing_together, require_alike
from gpudist.errors import CheckpointError
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.sbp.global_parameter import block_of, state_of
from gpudist.world.partition import Partition
from gpudist.world.texts import gather_texts_on_first

# By parameter and by key of its state: description of a tensor or of a value.
StateDescription = dict[str, dict[str, dict[str, Any]]]


def parameter_names(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises:
        CheckpointError: if a parameter does not belong to the module.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if any(map(is_sharded, module.parameters())):
        raise CheckpointError(
            "parameters are DTensors, and so is the optimizer's state; save and load it by "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group):
        raise CheckpointError(
            "the optimizer has parameters that do not belong to the module; create it from the "
            "module's parameters"
        )
    return [[name for name in group if name is not None] for group in groups]


def require_same_parameters(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, P_world: Partition
) -> list[list[str]]:
    """Return :func:`parameter_names` if they agree on all ranks. Collective over the world."""
    with failing_together(P_world, "naming the optimizer's parameters"):
        groups = parameter_names(module, optimizer)
    require_alike(P_world, "the optimizer's parameters", repr(groups))
    return groups


def describe_state(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    placed: dict[str, ParameterPlacement],
    P_world: Partition,
) -> StateDescription:
    """Describe the optimizer's state on the first owner of each parameter. Collective.

    Raises:
        CheckpointError: on every rank, if state has neither the parameter's shape nor is a value,
            or has a dtype that does not exist in the torch of one rank.
    """
    mine: StateDescription = {}
    what = "describing the optimizer's state"
    with failing_together(P_world, what):
        for name, parameter in module.named_parameters():
            # If several ranks have values, those of the first owner are used.
            owner = placed[name].P.ranks[0] if name in placed else 0
            state = optimizer.state.get(parameter)
            if state and owner == P_world.rank:
                mine[name] = describe_values(name, tuple(parameter.shape), state)
    described: StateDescription = {}
    for text in gather_texts_on_first(P_world, json.dumps(mine).encode()):
        described |= json.loads(text)
    described = json.loads(broadcast_text(P_world, json.dumps(described), 0))
    with failing_together(P_world, what):
        for keys in described.values():
            for about in keys.values():
                decode(about["value"])
    return described


def new_state(parameter: torch.Tensor, about: dict[str, Any]) -> Any:
    """Return a described value, or zeros of the described dtype, laid out like the parameter."""
    value = decode(about["value"])
    is_tensor = about["kind"] == "tensor"
    return state_of(parameter, empty_block(parameter, value)) if is_tensor else value


def state_block(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    key: str,
    about: dict[str, Any],
    placement: ParameterPlacement | None,
) -> torch.Tensor:
    """Return this rank's block of a tensor of the state; zeros if it has none."""
    value = optimizer.state.get(parameter, {}).get(key)
    return block_of(new_state(parameter, about) if value is None else value, placement)


def empty_block(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Create zeros with the shape of this rank's block of a parameter."""
    return torch.zeros(block_of(parameter).shape, dtype=dtype, device=parameter.device)


def describe_values(
    name: str, shape: tuple[int, ...], state: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Describe the state of the parameter ``name`` of this shape, by its keys.

    Raises:
        CheckpointError: if a value is neither a dense tensor of this shape nor can be encoded.
    """
    described: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        what = f"{key} of {name}"
        is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        if is_tensor and tuple(value.shape) != shape:
            raise CheckpointError(
                f"{what} has shape {list(value.shape)}, the parameter {list(shape)}; only state of "
                "the same shape, or of one cell, has a sequential counterpart"
            )
        if is_tensor:
            require_cells(value, what)
        stored = encode(value.dtype if is_tensor else value, what)
        described[key] = {"kind": "tensor" if is_tensor else "value", "value": stored}
    return described


def require_complete(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer has more than groups of parameters and state of these parameters.

    Raises:
        CheckpointError: if its state dict has other entries, or state belongs to anything else.
    """
    other = set(optimizer.state_dict()) - {"state", "param_groups"}
    if other:
        raise CheckpointError(
            f"the optimizer's state dict has {sorted(map(str, other))} beside 'state' and "
            "'param_groups'; save them outside the checkpoint"
        )
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for owner, values in optimizer.state.items():
        if values and id(owner) not in known:
            what = "a tensor" if isinstance(owner, torch.Tensor) else repr(owner)
            raise CheckpointError(
                f"the optimizer has state of {what}, which is in none of its groups; remove it, or "
                "save it outside the checkpoint"
            )


def set_state(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    same_dtype: Collection[int] = (),
) -> None:
    """Load a state dict of this rank's own blocks, which an error may leave partly loaded.

    Torch converts all tensors of the state to the dtype of their parameter. That is undone, unless
    a floating-point tensor has the parameter's shape and the parameter may have had another dtype.

    Args:
        optimizer: optimizer to fill.
        state_dict: its state dict.
        same_dtype: numbers of parameters that had the same dtype when the state was saved.
    """
    for group in state_dict["param_groups"]:
        # The optimizer keeps its own names: those of the state dict may be in another order.
        group.pop("param_names", None)
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=True))
    for number, values in state_dict["state"].items():
        parameter = by_number[number]
        for key, value in values.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.is_floating_point()
                and key != "step"
                and number not in same_dtype
            ):
                values[key] = convert_dtype(value, parameter.dtype, f"{key} of parameter {number}")
    loadable, converts = state_dict, _is_loaded_by_torch(optimizer)
    if converts:
        kept = {
            number: {key: _convertible(value) for key, value in values.items()}
            for number, values in state_dict["state"].items()
        }
        loadable = state_dict | {"state": kept}
    try:
        optimizer.load_state_dict(loadable)
    except Exception as error:  # The type of the error depends on the optimizer.
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the optimizer does not take the state: {text}") from error
    for number, values in state_dict["state"].items() if converts else ():
        parameter = by_number[number]
        state = optimizer.state[parameter]
        for key, value in values.items():
            # The optimizer may have dropped a value, or made a tensor of a number.
            both = isinstance(state.get(key), torch.Tensor), isinstance(value, torch.Tensor)
            if key != "step" and key in state and both[0] == both[1]:
                state[key] = _move(value, parameter.device)


def _is_loaded_by_torch(optimizer: torch.optim.Optimizer) -> bool:
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not any(
        getattr(optimizer, name, None) for name in hooks
    )


def _convertible(value: Any) -> Any:
    # Torch warns of complex numbers, and turns texts into the texts of generators.
    if isinstance(value, torch.Tensor):
        return torch.view_as_real(value) if value.is_complex() else value
    return value if isinstance(value, (bool, int, float)) else None


def _move(value: Any, device: torch.device) -> Any:
    # Torch's tree_map would turn a torch.Size into a tuple.
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (dict, OrderedDict)):
        return type(value)((key, _move(item, device)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_move(item, device) for item in value)
    return copy.copy(value)


@contextmanager
def restore_on_failure(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restore the state and the groups of ``optimizer`` if the body raises."""
    if optimizer is None:
        yield
        return
    state, groups = optimizer.state, optimizer.param_groups
    in_state = {parameter: copy.copy(values) for parameter, values in state.items()}
    in_groups = list(map(copy.copy, groups))
    try:
        yield
    except BaseException:
        state.clear()
        state.update(in_state)
        groups[:] = in_groups
        optimizer.state, optimizer.param_groups = state, groups
        raise
