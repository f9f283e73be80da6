"""The state of the sequential model's optimizer, from and to that of the distributed one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpudist.arguments import checked
from gpudist.checkpoint.moving import gather_blocks, scatter_blocks
from gpudist.checkpoint.optimizer_state import (
    described_state,
    empty_state,
    new_state,
    require_same_parameters,
    set_state,
    unchanged_by_failure,
    whole_shape,
)
from gpudist.checkpoint.sequential import world_of
from gpudist.checkpoint.texts import broadcast_text, failing_together
from gpudist.checkpoint.values import decode, encode, name_of
from gpudist.errors import CheckpointError
from gpudist.nn.placement import Placement, placements


@checked(CheckpointError)
def full_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, to_all: bool = False
) -> dict[str, Any]:
    """The state dict that the optimizer of the sequential model would have.

    Collective over the world. State of the shape of its parameter is put together from blocks;
    tensors of one cell, as the number of steps, are those of the parameter's first owner.

    Args:
        module: a tree of layers, distributed or not, the same on every rank.
        optimizer: of its parameters, with the same groups on every rank.
        to_all: every rank gets it, instead of rank 0.

    Returns:
        In the form of ``optimizer.state_dict()``, new tensors on the CPU; empty on the other ranks.

    Cost:
        A tensor at a time: one message per owner of a block; with ``to_all`` a broadcast of it.

    Raises:
        CheckpointError: on every rank, if the ranks' optimizers differ, or for state that is
            neither of the parameter's shape nor of one cell, or of a dtype that the torch of one
            rank does not have.
    """
    placed, P_world = placements(module), world_of(module)
    groups = require_same_parameters(module, optimizer, P_world)
    described = described_state(module, optimizer, placed, P_world)
    gets = to_all or P_world.rank == 0
    parameters = dict(module.named_parameters(remove_duplicate=False))
    state: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(name for group in groups for name in group):
        if name not in described:
            continue
        own, whole = optimizer.state.get(parameters[name], {}), {}
        for key, about in described[name].items():
            if about["kind"] == "value":
                whole[key] = decode(about["value"])
                continue
            block = own.get(key)
            if block is None:
                block = empty_state(parameters[name], about)
            where = placed.get(name) or Placement.everywhere(block.shape, P_world)
            whole[key] = gather_blocks(block, where, to_all=to_all)
        if gets:
            state[number] = whole
    if not gets:
        return {}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


@checked(CheckpointError)
def load_full_optimizer_state_dict(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    *,
    root: int = 0,
) -> None:
    """Fill the distributed model's optimizer from the state of the sequential one's.

    Collective over the world.

    Args:
        module: a tree of layers, distributed or not, the same on every rank.
        optimizer: of its parameters, in the same groups and order as the sequential one's.
        state_dict: on the root, what ``optimizer.state_dict()`` gives there; ignored elsewhere.
        root: the rank of the world that has it.

    Cost:
        A tensor at a time: one message per owner of a block.

    Raises:
        CheckpointError: on every rank, and nothing has changed, if groups or shapes do not fit, the
            optimizer does not take the state, or the torch of one rank does not have a dtype.
    """
    placed, P_world = placements(module), world_of(module)
    groups = require_same_parameters(module, optimizer, P_world)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shapes = {n: whole_shape(n, parameters[n], placed) for group in groups for n in group}
    text, what = None, "the state dict does not fit the optimizer"
    with failing_together(P_world, what):
        if P_world.rank == root:
            text = json.dumps(_described(state_dict, groups, shapes))
    told = json.loads(broadcast_text(P_world, text, root))
    with failing_together(P_world, what):
        options = decode(told["groups"])
        state: dict[int, dict[str, Any]] = {
            number: {k: new_state(parameters[name], v) for k, v in told["state"][name].items()}
            for number, name in enumerate(shapes)
            if name in told["state"]
        }
    for number, name in enumerate(shapes):
        for key, about in told["state"].get(name, {}).items():
            if about["kind"] == "value":
                continue
            block = state[number][key]
            where = placed.get(name) or Placement.everywhere(block.shape, P_world)
            given = None
            if P_world.rank == root and state_dict is not None:
                given = state_dict["state"][number][key]
            scatter_blocks(given, block, where, root)
    with unchanged_by_failure(optimizer), failing_together(P_world, what):
        set_state(optimizer, {"state": state, "param_groups": options})


def _described(
    state_dict: Mapping[str, Any] | None,
    groups: list[list[str]],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, Any]:
    """What the other ranks must know of a sequential optimizer's state dict."""
    if state_dict is None:
        raise CheckpointError("the root gave none; only the other ranks may pass None")
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != [len(group) for group in groups]:
        raise CheckpointError(
            f"its groups have {sizes} parameters, those of the optimizer "
            f"{[len(group) for group in groups]}"
        )
    state = state_dict["state"]
    unknown = [number for number in state if number not in range(len(shapes))]
    if unknown:
        raise CheckpointError(f"it has state of parameters {unknown} but there are {len(shapes)}")
    return {
        "state": {
            name: dict(_about(name, shape, state[number]))
            for number, (name, shape) in enumerate(shapes.items())
            if number in state
        },
        "groups": encode(state_dict["param_groups"], "param_groups"),
    }


def _about(
    name: str, shape: tuple[int, ...], state: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if tuple(value.shape) != shape:
                raise CheckpointError(
                    f"{key} of {name} has shape {list(value.shape)}, the parameter {list(shape)}"
                )
            yield key, {"kind": "tensor", "dtype": name_of(value.dtype)}
        else:
            yield key, {"kind": "value", "value": encode(value, f"{key} of {name}")}
