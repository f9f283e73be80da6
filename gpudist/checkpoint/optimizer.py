"""Convert between the optimizer state of the sequential and of the distributed model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from gpudist.checkpoint.conversion import require_dict
from gpudist.checkpoint.json_values import decode, encode
from gpudist.checkpoint.moving import gather_blocks, scatter_blocks
from gpudist.checkpoint.optimizer_state import (
    describe_state,
    describe_values,
    new_state,
    require_complete,
    require_same_parameters,
    restore_on_failure,
    set_state,
    state_block,
)
from gpudist.checkpoint.sequential import whole_shape, world_of
from gpudist.checkpoint.texts import broadcast_text, failing_together
from gpudist.checks.arguments import checked
from gpudist.errors import CheckpointError
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, placements
from gpudist.sbp.global_parameter import block_of


@checked(CheckpointError)
def full_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, to_all: bool = False
) -> dict[str, Any]:
    """Return the state dict that the optimizer of the sequential model would have.

    Collective over the world. Parameters are numbered in the order of ``optimizer``'s groups, as in
    torch; for a converted network this is the order of the sequential one. If the optimizer was
    created from ``named_parameters()``, groups have ``"param_names"``. State with the shape of its
    parameter is gathered from blocks; for tensors of one cell, such as the number of steps, the
    value of the parameter's first owner is used.

    Args:
        module: tree of layers, distributed or not, the same on every rank.
        optimizer: optimizer of its parameters, with the same groups on every rank.
        to_all: whether every rank gets the state dict, instead of rank 0 alone.

    Returns:
        State dict in the form of ``optimizer.state_dict()``, with new tensors on the CPU; empty on
        ranks that do not get it.

    Cost:
        For each tensor, one message per owner of a block; with ``to_all`` also a broadcast.

    Raises:
        CheckpointError: on every rank, if the ranks' optimizers differ, or if state has neither the
            parameter's shape nor one cell, or a dtype that does not exist in the torch of one rank.
    """
    placed, P_world = placements(module), world_of(module)
    groups = require_same_parameters(module, optimizer, P_world)
    with failing_together(P_world, "describing the optimizer"):
        require_complete(optimizer)
    described = describe_state(module, optimizer, placed, P_world)
    gets = to_all or P_world.rank == 0
    parameters = dict(module.named_parameters(remove_duplicate=False))
    state: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(name for group in groups for name in group):
        if name not in described:
            continue
        whole = {}
        for key, about in described[name].items():
            if about["kind"] == "value":
                whole[key] = decode(about["value"])
                continue
            block = state_block(optimizer, parameters[name], key, about, placed.get(name))
            where = placed.get(name) or ParameterPlacement.on(P_world, block.shape)
            whole[key] = gather_blocks(block, where, to_all=to_all)
        if gets:
            state[number] = whole
    if not gets:
        return {}
    options = optimizer.state_dict()["param_groups"]
    for group, names in zip(options, groups, strict=True):
        if sorted(group.get("param_names", ())) == sorted(names):
            # An earlier load of a state dict may have changed their order.
            group["param_names"] = names
    return {"state": state, "param_groups": options}


@checked(CheckpointError)
def load_full_optimizer_state_dict(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    *,
    root: int = 0,
) -> None:
    """Fill the distributed model's optimizer with the state of the sequential model's optimizer.

    Collective over the world. If groups of ``state_dict`` have ``"param_names"``, because the
    optimizer was created from ``named_parameters()``, state is matched by name; otherwise by order,
    as in torch.

    Args:
        module: tree of layers, distributed or not, the same on every rank.
        optimizer: optimizer of its parameters, in the same groups as the sequential one and,
            without names, in the same order. Its own ``"param_names"`` are kept.
        state_dict: on the root, result of ``optimizer.state_dict()``; ignored elsewhere.
        root: rank of the world that has the state dict.

    Cost:
        For each tensor, one message per owner of a block.

    Raises:
        CheckpointError: on every rank, before anything changes, if groups, names or shapes do not
            fit, the optimizer does not take the state, or a dtype does not exist in the torch of
            one rank.
    """
    placed, P_world = placements(module), world_of(module)
    groups = require_same_parameters(module, optimizer, P_world)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shapes = {n: whole_shape(n, parameters[n], placed) for group in groups for n in group}
    text, what = None, "the state dict does not fit the optimizer"
    numbers: dict[str, int] = {}
    with failing_together(P_world, what):
        if P_world.rank == root:
            given = require_dict(state_dict)
            numbers = _numbers(given, optimizer, groups)
            text = json.dumps(_describe(given, numbers, shapes))
    received = json.loads(broadcast_text(P_world, text, root))
    with failing_together(P_world, what):
        options = decode(received["groups"])
        state: dict[int, dict[str, Any]] = {
            number: {k: new_state(parameters[name], v) for k, v in received["state"][name].items()}
            for number, name in enumerate(shapes)
            if name in received["state"]
        }
    for number, name in enumerate(shapes):
        for key, about in received["state"].get(name, {}).items():
            if about["kind"] == "value":
                continue
            block = block_of(state[number][key], placed.get(name))
            where = placed.get(name) or ParameterPlacement.on(P_world, block.shape)
            whole = None
            if P_world.rank == root and state_dict is not None:
                whole = state_dict["state"][numbers[name]][key]
            scatter_blocks(whole, block, where, root)
    number_of = {name: number for number, name in enumerate(shapes)}
    for group, names in zip(options, groups, strict=True):
        group["params"] = [number_of[name] for name in names]
    with restore_on_failure(optimizer), failing_together(P_world, what):
        set_state(optimizer, {"state": state, "param_groups": options})


def _numbers(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer, groups: list[list[str]]
) -> dict[str, int]:
    """Return the number of each parameter in a sequential optimizer's state dict."""
    saved = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in saved]
    if sizes != [len(group) for group in groups]:
        raise CheckpointError(
            f"its groups have {sizes} parameters, those of the optimizer "
            f"{[len(group) for group in groups]}"
        )
    numbers: dict[str, int] = {}
    for i, (group, options, names) in enumerate(
        zip(saved, optimizer.param_groups, groups, strict=True)
    ):
        ordered = names
        if "param_names" in group:
            ordered = _in_order(group["param_names"], names, options.get("param_names", names), i)
        numbers |= dict(zip(ordered, group["params"], strict=True))
    return numbers


def _in_order(saved: list[str], names: list[str], created: list[str], group: int) -> list[str]:
    """Return the parameters of a group, in the order in which a state dict names them.

    Args:
        saved: names in the state dict.
        names, created: names in the module, and names with which the optimizer was created.
        group: number of the group, for errors.
    """
    for known in (names, created):
        if sorted(saved) == sorted(known):
            by_name = dict(zip(known, names, strict=True))
            return [by_name[name] for name in saved]
    unknown = [name for name in saved if name not in names]
    missing = [name for name in names if name not in saved]
    raise CheckpointError(
        f"its group {group} names the parameters {unknown}, which the optimizer's group does not "
        f"have, and lacks {missing}; create both optimizers from the same groups of "
        "named_parameters(), or rename the state dict's 'param_names'"
    )


def _describe(
    state_dict: Mapping[str, Any],
    numbers: dict[str, int],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Describe a sequential optimizer's state dict for the other ranks."""
    state = state_dict["state"]
    unknown = [number for number in state if number not in numbers.values()]
    if unknown:
        raise CheckpointError(
            f"it has state of parameters {unknown} but there are {len(shapes)}; load it into the "
            "model and optimizer that saved it"
        )
    return {
        "state": {
            name: describe_values(name, shape, state[numbers[name]])
            for name, shape in shapes.items()
            if numbers[name] in state
        },
        "groups": encode(state_dict["param_groups"], "param_groups"),
    }
