"""Convert between the state dict of the sequential model and blocks of the distributed one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpudist.checkpoint.conversion import convert_dtype, require_dict
from gpudist.checkpoint.extra_state import (
    encode_extra,
    give_extra,
    modules_with_extra,
    require_fillable,
)
from gpudist.checkpoint.json_values import decode
from gpudist.checkpoint.moving import gather_blocks, scatter_blocks
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
    full: dict[str, Any] = {}
    for name in names:
        value = state[name]
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
    modules their extra state, last. Tensors are converted as by :func:`load`.

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
    placed, P_world = placements(module), world_of(module)
    names = _sequential_names(module)
    state = module.state_dict()
    require_alike(P_world, "the names and shapes", describe_shapes(names, state, placed))
    text, what = None, "the state dict does not fit the model"
    with failing_together(P_world, what):
        require_fillable(module, state)
        if P_world.rank == root:
            text = _text_of_extra(module, state_dict, state, names, placed)
    extra = json.loads(broadcast_text(P_world, text, root))
    for name in names:
        if name in extra:
            continue
        block, whole = state[name], None
        if state_dict is not None and P_world.rank == root:
            whole = convert_dtype(state_dict[name].detach(), block.dtype, name)
        where = placed.get(name) or ParameterPlacement.on(P_world, block.shape)
        scatter_blocks(whole, block, where, root)
    with failing_together(P_world, what):
        give_extra(module, {name: decode(value) for name, value in extra.items()})


def _text_of_extra(
    module: torch.nn.Module,
    state_dict: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    names: list[str],
    placed: dict[str, ParameterPlacement],
) -> str:
    """Return the extra state in a sequential state dict, as JSON.

    Raises:
        CheckpointError: if the state dict does not fit the module.
    """
    state_dict = require_dict(state_dict)
    wanted = {
        name: (_shape(name, state[name], placed), state[name].dtype)
        for name in names
        if name not in modules_with_extra(module)
    }
    missing = [name for name in names if name not in state_dict]
    unknown = [name for name in state_dict if name not in state]
    problems = [f"it misses {missing}"] if missing else []
    problems += [f"the model has no {unknown}"] if unknown else []
    problems += _problems(state_dict, wanted)
    if problems:
        raise CheckpointError("; ".join(problems))
    return encode_extra(module, state_dict)


def world_of(module: torch.nn.Module) -> Partition:
    """Return the world of the layers of ``module``."""
    for placement in placements(module).values():
        return placement.P.world
    for part in module.modules():
        P_x = getattr(part, "P_x", None)
        if isinstance(P_x, Partition):
            return P_x.world
    return runtime.init()


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


def _shape(name: str, value: Any, placed: dict[str, ParameterPlacement]) -> tuple[int, ...] | None:
    if name in placed:
        return placed[name].shape
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def describe_shapes(
    names: list[str], state: Mapping[str, Any], placed: dict[str, ParameterPlacement]
) -> str:
    """Return a text with the names and global shapes, for comparison between ranks."""
    return repr([(name, _shape(name, state[name], placed)) for name in names])


def _problems(
    state_dict: Mapping[str, Any], wanted: dict[str, tuple[tuple[int, ...] | None, torch.dtype]]
) -> Iterator[str]:
    for name, (shape, dtype) in wanted.items():
        if name not in state_dict:
            continue
        value = state_dict[name]
        if not isinstance(value, torch.Tensor):
            yield f"{name} is a {type(value).__name__}, not a tensor"
        elif tuple(value.shape) != shape:
            yield f"{name} has shape {list(value.shape)}, not {list(shape or ())}"
        else:
            try:
                convert_dtype(value.detach(), dtype, name)
            except CheckpointError as error:
                yield str(error)
