"""State dicts of global parameters: each rank saves and loads its block, an ordinary tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from gpudist.nn.parameters.parameter_placement import ParameterPlacement, set_placements
from gpudist.sbp.global_parameter import GlobalParameter, block_of


def keep_blocks(module: nn.Module) -> None:
    """Let ``state_dict`` and ``load_state_dict`` of a module use blocks of its parameters."""
    set_placements(module, partial(_placements_of, module._parameters))
    module.register_state_dict_post_hook(_save_blocks)
    module.register_load_state_dict_pre_hook(_load_blocks)


def _placements_of(parameters: dict[str, Any]) -> dict[str, ParameterPlacement]:
    return {name: p.placed for name, p in parameters.items() if isinstance(p, GlobalParameter)}


def drop_hooks(module: nn.Module) -> None:
    """Remove the hooks and placements of :func:`keep_blocks`."""
    vars(module).pop("_placements", None)
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        own = (_save_blocks, _load_blocks)
        for number in [i for i, h in hooks.items() if getattr(h, "hook", h) in own]:
            del hooks[number]


def _save_blocks(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module._parameters.items():
        if isinstance(parameter, GlobalParameter):
            state[prefix + name] = block_of(state[prefix + name], parameter.placed)


def _load_blocks(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    for name, parameter in module._parameters.items():
        value, full = state.get(prefix + name), prefix + name
        if not isinstance(parameter, GlobalParameter) or not isinstance(value, torch.Tensor):
            continue
        value = block_of(value, parameter.placed)
        expected = parameter.placed.own_shape
        if type(value) not in (torch.Tensor, nn.Parameter) or value.shape != expected:
            errors.append(
                f"{full}: the state dict has shape {list(value.shape)}, and this worker's block "
                f"has shape {list(expected)} of {list(parameter.shape)}; load a state dict that "
                "this network made on this worker, or a whole one with "
                "gpudist.checkpoint.load_full_state_dict"
            )
            state[full] = parameter
            continue
        if not metadata.get("assign_to_params_buffers"):
            value = value.to(parameter.device, parameter.dtype)
        state[full] = parameter.with_cells(value.detach())
