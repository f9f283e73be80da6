"""Convert between the state dict of the sequential model and blocks of the distributed one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpudist.checkpoint.moving import gather_blocks, scatter_blocks
from gpudist.checkpoint.texts import broadcast_text, require_alike
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
    require_alike(P_world, "the names and shapes", described(names, state, placed))
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

    Collective over the world. Layers that are not distributed get the values on every rank.

    Args:
        module: tree of layers, distributed or not, the same on every rank.
        state_dict: on the root, tensors on any device; ignored elsewhere.
        root: rank of the world that has the state dict.

    Cost:
        For each tensor, one message per owner of a block; also a broadcast if it is replicated.

    Raises:
        CheckpointError: on every rank, before anything changes, if a name is missing or unknown, or
            a shape differs.
    """
    placed, P_world = placements(module), world_of(module)
    names = _sequential_names(module)
    state = module.state_dict()
    require_alike(P_world, "the names and shapes", described(names, state, placed))
    problem = None
    if P_world.rank == root:
        wanted = {name: _shape(name, state[name], placed) for name in names}
        extra = state.keys() - set(names)
        problem = _problem_of(state_dict, wanted, extra)
    problem = broadcast_text(P_world, problem, root)
    if problem:
        raise CheckpointError(f"the state dict does not fit the model: {problem}")
    for name in names:
        own = state[name]
        if isinstance(own, torch.Tensor):
            given = state_dict[name] if state_dict is not None and P_world.rank == root else None
            where = placed.get(name) or ParameterPlacement.on(P_world, own.shape)
            scatter_blocks(given, own, where, root)


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


def described(
    names: list[str], state: Mapping[str, Any], placed: dict[str, ParameterPlacement]
) -> str:
    """Return a text with the names and global shapes, for comparison between ranks."""
    return repr([(name, _shape(name, state[name], placed)) for name in names])


def _problem_of(
    given: Mapping[str, Any] | None, wanted: dict[str, tuple[int, ...] | None], extra: set[str]
) -> str:
    if given is None:
        return "the root passed None; only the other ranks may pass None"
    return "; ".join(_problems(given, wanted, extra))


def _problems(
    given: Mapping[str, Any], wanted: dict[str, tuple[int, ...] | None], extra: set[str]
) -> Iterator[str]:
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted and name not in extra]
    if missing:
        yield f"it misses {missing}"
    if unknown:
        yield f"the model has no {unknown}"
    for name, shape in wanted.items():
        if name not in given or shape is None:
            continue
        value = given[name]
        if not isinstance(value, torch.Tensor):
            yield f"{name} is a {type(value).__name__}, not a tensor"
        elif tuple(value.shape) != shape:
            yield f"{name} has shape {list(value.shape)}, not {list(shape)}"
