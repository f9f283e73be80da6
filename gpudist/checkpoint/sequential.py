"""Convert between the state dict of the sequential model and blocks of the distributed one."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from gpudist.checkpoint.conversion import convert_dtype, require_dict
from gpudist.checkpoint.extra_state import (
    give_extra,
    modules_with_extra,
    require_fillable,
)
from gpudist.checkpoint.json_values import decode, text_of_values
from gpudist.checkpoint.migrations import finish_loading, load_whole
from gpudist.checkpoint.moving import filled, gather_blocks, scatter_blocks, whole_of
from gpudist.checkpoint.texts import broadcast_text, failing_together, require_alike
from gpudist.checks.arguments import checked
from gpudist.errors import CheckpointError
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, placements
from gpudist.world import runtime
from gpudist.world.partition import Partition


@checked(CheckpointError)
def full_state_dict(module: torch.nn.Module, *, to_all: bool = False) -> dict[str, Any]:
    """Return the state dict that the sequential model would have: same names, shapes and values.

    Collective over the world. Seeds of dropout, which the sequential layers do not have, are
    omitted. Values of layers that are not distributed are taken from the rank that gets the result.

    Args:
        module: tree of layers, distributed or not, the same on every rank.
        to_all: whether every rank gets the state dict, instead of rank 0 alone.

    Returns:
        New tensors on the CPU, by name; empty on ranks that do not get them.

    Cost:
        For each tensor, one message per owner of a block; with ``to_all`` also a broadcast.

    Raises:
        CheckpointError: on every rank, if the ranks have different models.
    """
    placed, P_world = placements(module), world_of(module)
    names = _sequential_names(module)
    state = module.state_dict()
    require_alike(P_world, "the names and shapes", describe_shapes(names, state, placed))
    gets = to_all or P_world.rank == 0
    full: Any = OrderedDict()
    # Versions of the modules, by which later ones convert the state dict.
    full._metadata = versions_of(state)
    for name in names:
        value = whole_of(state[name])
        if name in placed:
            value = gather_blocks(value, placed[name], to_all=to_all)
        elif isinstance(value, torch.Tensor):
            value = value.detach().cpu().clone()
        if gets:
            full[name] = value
    return full


@checked(CheckpointError)
def load_full_state_dict(
    module: torch.nn.Module, state_dict: Mapping[str, Any] | None, *, root: int = 0
) -> None:
    """Fill the distributed model from the state dict of the sequential one.

    Collective over the world. Layers that are not distributed get the values on every rank, and
    modules their extra state, last. Modules convert older versions by their own
    ``_load_from_state_dict`` and hooks, on the root. Tensors are converted as by :func:`load`.

    Args:
        module: tree of layers, distributed or not, the same on every rank.
        state_dict: on the root, tensors on any device; ignored elsewhere.
        root: rank of the world that has the state dict.

    Cost:
        For each tensor, one message per owner of a block; also a broadcast if it is replicated.

    Raises:
        CheckpointError: on every rank, before anything changes, if a name is missing or unknown, a
            shape differs, or a tensor does not convert to the module's dtype. Later, if a module
            rejects its extra state.
    """
    fill(module, state_dict, root, _sequential_names(module))


def fill(
    module: torch.nn.Module, state_dict: Mapping[str, Any] | None, root: int, names: list[str]
) -> None:
    """Fill the tensors with these names, as :func:`load_full_state_dict`."""
    placed, P_world = placements(module), world_of(module)
    state = module.state_dict()
    require_alike(P_world, "the names and shapes", describe_shapes(names, state, placed))
    text, what = None, "the state dict does not fit the model"
    whole: dict[str, torch.Tensor] = {}
    with failing_together(P_world, what):
        require_fillable(module, state)
        if P_world.rank == root:
            whole, text = _migrate(module, state_dict, state, names, placed)
    extra, attributes = map(json.loads, json.loads(broadcast_text(P_world, text, root)))
    for name in names:
        if name not in modules_with_extra(module):
            where = placed.get(name) or ParameterPlacement.on(P_world, state[name].shape)
            with filled(state[name]) as block:
                x = whole.get(name)
                x = None if x is None else convert_dtype(x, block.dtype, name)
                scatter_blocks(x, block, where, root)
    with failing_together(P_world, what):
        give_extra(module, {name: decode(value) for name, value in extra.items()})
        for path, values in attributes.items():
            vars(module.get_submodule(path)).update(decode(values))
        finish_loading(module)


def _migrate(
    module: torch.nn.Module,
    state_dict: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    names: list[str],
    placed: dict[str, ParameterPlacement],
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the whole tensors to fill the module with, and extra state and attributes as JSON.

    Raises:
        CheckpointError: if the state dict does not fit the module.
    """
    loaded, extra_of, changed, keys = load_whole(module, require_dict(state_dict), placed)
    extra = modules_with_extra(module)
    tensors = {name: loaded[name] for name in names if name not in extra}
    missing = [name for name in keys.missing_keys if name in names]
    problems = [f"it misses {missing}"] if missing else []
    problems += [f"the model has no {keys.unexpected_keys}"] if keys.unexpected_keys else []
    for name, x in tensors.items() if not missing else ():
        shape = whole_shape(name, state[name], placed)
        if x.is_meta or tuple(x.shape) != shape:
            problems.append(f"{name} became {list(x.shape)} on {x.device}, not {list(shape)}")
        else:
            convert_dtype(x, state[name].dtype, name)
    if problems:
        raise CheckpointError("; ".join(problems))
    values = {name: extra_of[part] for name, part in extra.items() if part in extra_of}
    attributes = {path: values for path, values in changed.items() if values}
    return tensors, json.dumps([text_of_values(values), text_of_values(attributes)])


def world_of(module: torch.nn.Module) -> Partition:
    """Return the world of the layers of ``module``."""
    for placement in placements(module).values():
        return placement.P.world
    for part in module.modules():
        P_x = getattr(part, "P_x", None)
        if isinstance(P_x, Partition):
            return P_x.world
    return runtime.init()


def versions_of(state_dict: Mapping[str, Any]) -> Any:
    """Return the versions of the modules; ``None`` of a state dict that a user has made."""
    return getattr(state_dict, "_metadata", None)


def names_beyond_sequential(module: torch.nn.Module) -> set[str]:
    """Return the names in the state dict that the sequential model does not have."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules(remove_duplicate=False)
        for name in getattr(layer, "beyond_sequential", ())
    }


def _sequential_names(module: torch.nn.Module) -> list[str]:
    beyond = names_beyond_sequential(module)
    return [name for name in module.state_dict() if name not in beyond]


def whole_shape(
    name: str, value: torch.Tensor, placed: dict[str, ParameterPlacement]
) -> tuple[int, ...]:
    """Return the global shape of a tensor of the state dict."""
    return placed[name].shape if name in placed else tuple(value.shape)


def describe_shapes(
    names: list[str], state: Mapping[str, Any], placed: dict[str, ParameterPlacement]
) -> str:
    """Return a text with the names and global shapes, for comparison between ranks."""
    tensors = {name for name in names if isinstance(state[name], torch.Tensor)}
    shapes = {n: whole_shape(n, state[n], placed) if n in tensors else None for n in names}
    return repr(shapes)
