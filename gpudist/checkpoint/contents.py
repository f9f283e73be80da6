"""Contents of a checkpoint: parts of a model and its optimizer, and their names."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gpudist.checkpoint.block_tensor import BlockTensor
from gpudist.checkpoint.conversion import dtype_problem
from gpudist.checkpoint.extra_state import (
    assemble_model,
    extra_to_save,
    modules_with_extra,
    require_fillable,
    whole_to_read,
)
from gpudist.checkpoint.identity import identity_of
from gpudist.checkpoint.json_values import decode, encode
from gpudist.checkpoint.migrations import migrations_of
from gpudist.checkpoint.moving import is_sharded, whole_of
from gpudist.checkpoint.nested import assemble, entries_of
from gpudist.checkpoint.optimizer_state import (
    describe_state,
    empty_block,
    parameter_names,
    require_complete,
    require_same_parameters,
    set_state,
    state_block,
)
from gpudist.checkpoint.sequential import (
    describe_shapes,
    fill,
    names_beyond_sequential,
    versions_of,
    whole_shape,
)
from gpudist.checkpoint.texts import failing_together, require_alike
from gpudist.convert.converted import Converted, conversion_of
from gpudist.errors import CheckpointError
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, placements
from gpudist.sbp.global_parameter import state_of
from gpudist.sbp.scope import Scope
from gpudist.world.partition import Partition

# Name of the modules' versions and the states of random numbers in a checkpoint.
NOTES = "gpudist"


def model_to_save(module: torch.nn.Module, P_world: Partition) -> dict[str, Any]:
    """Return this rank's blocks of the state dict; on rank 0 also replicated values. Collective."""
    placed, state = placements(module), module.state_dict()
    require_alike(P_world, "the names and shapes", describe_shapes(list(state), state, placed))
    extra = extra_to_save(module, state, P_world)
    held: dict[str, Any] = {}
    for name, value in (state | extra).items():
        value = whole_of(value)
        if name in placed or P_world.rank == 0:
            held[name] = _as_entry(value, placed.get(name))
    return held


def notes_to_save(module: torch.nn.Module) -> str:
    """Return the versions of the modules and the states of networks' random numbers, as JSON."""
    versions = encode(versions_of(module.state_dict()), "the versions", cells=None)
    draws = {path: (x.seed, x.draws) for path, x in _scopes_in(module).items()}
    return json.dumps([versions, draws])


def use_draws(module: torch.nn.Module, notes: str | None) -> None:
    """Let networks draw random numbers as if they had made the calls before the save."""
    draws = {} if notes is None else json.loads(notes)[1]
    for path, scope in _scopes_in(module).items():
        scope.seed, scope.draws = draws.get(path, (scope.seed, scope.draws))


def _scopes_in(module: torch.nn.Module) -> dict[str, Scope]:
    parts = [each for each in module.named_modules() if isinstance(each[1], Converted)]
    return {path: conversion_of(part).scope for path, part in parts}


def may_convert(module: torch.nn.Module, metadata: Metadata) -> bool:
    """Return whether this rank's modules may convert what they load, or have DTensors.

    torch's own modules convert those alone whose names differ from theirs.
    """
    state, beyond = module.state_dict(), names_beyond_sequential(module)
    rooms = {str(getattr(f, "__module__", "")).partition(".")[0] for f in migrations_of(module)}
    names = {f"model.{name}" for name in state if name not in beyond}
    fits = metadata.state_dict_metadata.keys() >= names
    is_needed = rooms - {"torch", "gpudist"} or ("torch" in rooms and not fits)
    return bool(is_needed) or any(map(is_sharded, state.values()))


def whole_model_to_read(metadata: Metadata) -> dict[str, Any]:
    """Return empty tensors for the whole model in a checkpoint, to be filled."""
    stored = metadata.state_dict_metadata
    return {name: whole_to_read(name, metadata) for name in stored if name.startswith("model.")}


def migrate(
    module: torch.nn.Module, metadata: Metadata, stored: dict[str, Any], notes: str | None
) -> None:
    """Fill the module from the tensors that rank 0 has read whole. Collective over the world."""
    whole: Any = OrderedDict(assemble_model(metadata, stored))
    if notes is not None:
        whole._metadata = decode(json.loads(notes)[0])
    elif identity_of(metadata) is not None:
        # Earlier versions of gpudist did not save it.
        whole._metadata = versions_of(module.state_dict())
    known, beyond = metadata.state_dict_metadata, names_beyond_sequential(module)
    names = [n for n in module.state_dict() if n not in beyond or f"model.{n}" in known]
    fill(module, whole, 0, names)


def optimizer_to_save(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, P_world: Partition
) -> dict[str, Any]:
    """Return this rank's part of the optimizer's state, by parameter name. Collective."""
    placed, parameters = placements(module), dict(module.named_parameters())
    groups = require_same_parameters(module, optimizer, P_world)
    options: list[dict[str, Any]] = []
    with failing_together(P_world, "saving the optimizer"):
        require_complete(optimizer)
        for number, names in enumerate(groups):
            group = optimizer.param_groups[number].copy()
            del group["params"]
            stored = decode(encode(group, f"param_groups[{number}]"))
            options.append({key: entries_of(value) for key, value in stored.items()})
            options[number]["params"] = names
    state: dict[str, dict[str, Any]] = {}
    for name, keys in describe_state(module, optimizer, placed, P_world).items():
        state[name] = {}
        for key, about in keys.items():
            if about["kind"] == "value":
                if P_world.rank == 0:
                    state[name][key] = entries_of(decode(about["value"]))
            elif name in placed or P_world.rank == 0:
                where = placed.get(name)
                block = state_block(optimizer, parameters[name], key, about, where)
                state[name][key] = _as_entry(block, where)
    return {"state": state} | ({"param_groups": options} if P_world.rank == 0 else {})


def _as_entry(value: Any, placement: ParameterPlacement | None) -> Any:
    return value if placement is None else BlockTensor(value, placement)


def model_to_load(module: torch.nn.Module, metadata: Metadata) -> dict[str, Any]:
    """Return the tensors of the module to fill in place, by their names in the checkpoint.

    Raises:
        CheckpointError: if names, shapes or kinds of numbers in the checkpoint differ from the
            module's.
    """
    placed, beyond = placements(module), names_beyond_sequential(module)
    state, extra = module.state_dict(), modules_with_extra(module)
    require_fillable(module, state)
    stored, paths = metadata.state_dict_metadata, metadata.planner_data or {}
    saved: set[str] = set()
    for full in stored:
        if full.startswith("model."):
            name = full.removeprefix("model.")
            path: tuple[Any, ...] = paths.get(full, ())
            saved.add(path[1] if len(path) > 1 and path[1] in extra else name)
    problems = [f"it misses {name}" for name in state if name not in saved | beyond]
    problems += [f"the model has no {name}" for name in sorted(saved - state.keys())]
    tensors = {name: value for name, value in state.items() if name in saved and name not in extra}
    for name, value in tensors.items():
        shape, about = whole_shape(name, value, placed), stored[f"model.{name}"]
        if not isinstance(about, TensorStorageMetadata):
            problems.append(f"{name} is not a tensor")
            continue
        if tuple(about.size) != shape:
            problems.append(f"{name} has shape {list(about.size)}, not {list(shape)}")
        problem = dtype_problem(about.properties.dtype, value.dtype)
        if problem:
            problems.append(f"{name} {problem}")
    if problems:
        raise CheckpointError("; ".join(problems))
    return {
        f"model.{name}": _as_entry(value.detach(), placed.get(name))
        for name, value in tensors.items()
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
        elif path[0] != "state" or (about.size.numel() == 1 and (not about.size or path[3:])):
            tensors[full] = whole_to_read(full, metadata)
        else:
            name = path[1]
            shape = whole_shape(name, parameters[name], placed)
            if tuple(about.size) != shape or path[3:]:
                raise CheckpointError(f"{full} has shape {list(about.size)}, not {list(shape)}")
            block = empty_block(parameters[name], about.properties.dtype)
            tensors[full] = _as_entry(block, placed.get(name))
    groups = {path[1] for _, path in _of_optimizer(metadata) if path[0] == "param_groups"}
    if {int(number) for number in groups} != set(range(len(optimizer.param_groups))):
        raise CheckpointError(
            f"it has {len(groups)} groups of parameters, but the optimizer has "
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
        if path[0] == "param_groups" and path[2:] == ("params",)
    }
    for number, names in enumerate(parameter_names(module, optimizer)):
        saved = stored.get(number)
        if not isinstance(saved, list) or sorted(map(str, saved)) != sorted(names):
            raise CheckpointError(f"a group has parameters {saved}, not {names}")


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
    parameters, stored = dict(module.named_parameters()), metadata.state_dict_metadata
    by_place: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
    for full, path in _of_optimizer(metadata):
        value = loaded[full]
        if isinstance(value, BlockTensor):
            value = state_of(parameters[path[1]], value.block)
        by_place.setdefault(path[:3], []).append((path[3:], value))
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = [{} for _ in names]
    for (part, owner, key), entries in by_place.items():
        value = assemble(entries, f"{owner}.{key}")
        if part == "state":
            state.setdefault(numbers[owner], {})[key] = value
        else:
            groups[int(owner)][key] = value
    for group, own_names in zip(groups, names, strict=True):
        group["params"] = [numbers[name] for name in own_names]
    same_dtype = {
        number
        for name, number in numbers.items()
        if isinstance(about := stored.get(f"model.{name}"), TensorStorageMetadata)
        and about.properties.dtype == parameters[name].dtype
    }
    set_state(optimizer, {"state": state, "param_groups": groups}, same_dtype)


def _of_optimizer(metadata: Metadata) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for full, path in (metadata.planner_data or {}).items():
        if path[0] == "optimizer" and len(path) > 3 and full in metadata.state_dict_metadata:
            yield full, tuple(path[1:])
