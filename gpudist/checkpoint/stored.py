"""Contents of a checkpoint: parts of a model and its optimizer, and their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gpudist.checkpoint.block_tensor import BlockTensor
from gpudist.checkpoint.json_values import decode
from gpudist.checkpoint.optimizer_state import (
    described_state,
    empty_state,
    parameter_names,
    require_same_parameters,
    set_state,
    whole_shape,
)
from gpudist.checkpoint.sequential import described, names_beyond_sequential
from gpudist.checkpoint.texts import require_alike
from gpudist.errors import CheckpointError
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, placements
from gpudist.world.partition import Partition


def model_to_save(module: torch.nn.Module, P_world: Partition) -> dict[str, Any]:
    """Return this rank's blocks of the state dict; on rank 0 also replicated values. Collective."""
    placed, state = placements(module), module.state_dict()
    require_alike(P_world, "the names and shapes", described(list(state), state, placed))
    return {
        name: _stored(value, placed.get(name))
        for name, value in state.items()
        if name in placed or P_world.rank == 0
    }


def optimizer_to_save(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, P_world: Partition
) -> dict[str, Any]:
    """Return this rank's part of the optimizer's state, by parameter name. Collective."""
    placed, parameters = placements(module), dict(module.named_parameters())
    groups = require_same_parameters(module, optimizer, P_world)
    state: dict[str, dict[str, Any]] = {}
    for name, keys in described_state(module, optimizer, placed, P_world).items():
        own = optimizer.state.get(parameters[name], {})
        state[name] = {}
        for key, about in keys.items():
            if about["kind"] == "value":
                if P_world.rank == 0:
                    state[name][key] = decode(about["value"])
            elif name in placed or P_world.rank == 0:
                block = own.get(key)
                if block is None:
                    block = empty_state(parameters[name], about)
                state[name][key] = _stored(block, placed.get(name))
    if P_world.rank != 0:
        return {"state": state}
    options = [
        {**group, "params": names}
        for group, names in zip(optimizer.param_groups, groups, strict=True)
    ]
    return {"state": state, "param_groups": options}


def _stored(value: Any, placement: ParameterPlacement | None) -> Any:
    return value if placement is None else BlockTensor(value, placement)


def model_to_load(
    module: torch.nn.Module, metadata: Metadata, P_world: Partition
) -> dict[str, Any]:
    """Return the tensors of the module to fill in place, by their names in the checkpoint.

    Raises:
        CheckpointError: if names or shapes in the checkpoint differ from the module's.
    """
    placed, beyond = placements(module), names_beyond_sequential(module)
    stored = metadata.state_dict_metadata
    own = {name: v for name, v in module.state_dict().items() if isinstance(v, torch.Tensor)}
    given = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    problems = [f"it misses {name}" for name in own if name not in given | beyond]
    problems += [f"the model has no {name}" for name in sorted(given - module.state_dict().keys())]
    for name in own.keys() & given:
        shape, about = whole_shape(name, own[name], placed), stored[f"model.{name}"]
        if not isinstance(about, TensorStorageMetadata):
            problems.append(f"{name} is not a tensor")
        elif tuple(about.size) != shape:
            problems.append(f"{name} has shape {list(about.size)}, not {list(shape)}")
    if problems:
        raise CheckpointError("; ".join(problems))
    return {
        f"model.{name}": _stored(value.detach(), placed.get(name))
        for name, value in own.items()
        if name in given
    }


def optimizer_to_load(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts of the optimizer to read, by their names in the checkpoint.

    Returns:
        ``None`` for each value, and new tensors for the state, to be filled.

    Raises:
        CheckpointError: if the checkpoint has state of other parameters or of other shapes.
    """
    placed, parameters = placements(module), dict(module.named_parameters())
    known = {name for group in parameter_names(module, optimizer) for name in group}
    values: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for full, path in _of_optimizer(metadata):
        about = metadata.state_dict_metadata[full]
        if path[0] == "state" and path[1] not in known:
            raise CheckpointError(
                f"the optimizer has no parameter {path[1]}, but the checkpoint has its state"
            )
        if not isinstance(about, TensorStorageMetadata):
            values[full] = None
        elif len(about.size) == 0:
            tensors[full] = torch.zeros((), dtype=about.properties.dtype)
        else:
            name = path[1]
            shape = whole_shape(name, parameters[name], placed)
            if tuple(about.size) != shape:
                raise CheckpointError(f"{full} has shape {list(about.size)}, not {list(shape)}")
            dtype, device = about.properties.dtype, parameters[name].device
            block = torch.zeros(parameters[name].shape, dtype=dtype, device=device)
            tensors[full] = _stored(block, placed.get(name))
    groups = len({path[1] for _, path in _of_optimizer(metadata) if path[0] == "param_groups"})
    if groups != len(optimizer.param_groups):
        raise CheckpointError(
            f"it has {groups} groups of parameters, but the optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    return values, tensors


def require_same_groups(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    metadata: Metadata,
    values: dict[str, Any],
) -> None:
    """Raise if the groups that were read have other parameters.

    Raises:
        CheckpointError: if a group has other parameters. Their order is ignored, because state is
            matched by name.
    """
    stored = {
        int(path[1]): values.get(full)
        for full, path in _of_optimizer(metadata)
        if path[0] == "param_groups" and path[2] == "params"
    }
    for number, own in enumerate(parameter_names(module, optimizer)):
        found = stored.get(number)
        if not isinstance(found, list) or sorted(map(str, found)) != sorted(own):
            raise CheckpointError(f"a group has parameters {found}, not {own}")


def set_optimizer(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    metadata: Metadata,
    loaded: dict[str, Any],
) -> None:
    """Load the state that was read into the optimizer.

    Raises:
        CheckpointError: if the optimizer rejects it; the optimizer may have changed in part.
    """
    names = parameter_names(module, optimizer)
    numbers = {name: i for i, name in enumerate(name for group in names for name in group)}
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = [{} for _ in names]
    for full, path in _of_optimizer(metadata):
        value = loaded[full]
        if isinstance(value, BlockTensor):
            value = value.block
        if path[0] == "state":
            state.setdefault(numbers[path[1]], {})[path[2]] = value
        else:
            groups[int(path[1])][path[2]] = value
    for group, own in zip(groups, names, strict=True):
        group["params"] = [numbers[name] for name in own]
    set_state(optimizer, {"state": state, "param_groups": groups})


def _of_optimizer(metadata: Metadata) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for full, path in (metadata.planner_data or {}).items():
        if path[0] == "optimizer" and len(path) == 4 and full in metadata.state_dict_metadata:
            yield full, tuple(path[1:])
