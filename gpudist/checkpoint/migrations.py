"""Conversion of a state dict by the modules themselves: older versions, hooks, extra state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore

from gpudist.convert.block_effects import contents_of, differ
from gpudist.convert.blocks_in_state_dict import drop_hooks
from gpudist.nn.parameters.parameter_placement import ParameterPlacement

_COPIED = dict, OrderedDict, list, set


def load_whole(
    module: nn.Module, state_dict: Mapping[str, Any], placed: Mapping[str, ParameterPlacement]
) -> tuple[dict[str, torch.Tensor], dict[nn.Module, Any], dict[str, dict[str, Any]], Any]:
    """Load a sequential state dict into twins of the modules, with tensors of its shapes.

    Returns:
        Whole tensors by name, on the meta device if loading has not set one that workers hold in
        parts; extra state by module; other attributes that loading has set, by path of the module;
        and the names that are missing or unexpected.

    Raises:
        RuntimeError: a tensor does not fit, with torch's text.
    """
    extra: dict[nn.Module, Any] = {}
    twins: dict[nn.Module | None, Any] = {None: None}
    before: dict[str, dict[str, Any]] = {}
    for path, part in module.named_modules():
        values = {k: copy.copy(v) if type(v) in _COPIED else v for k, v in vars(part).items()}
        for tensors in (values["_parameters"], values["_buffers"]):
            for name, x in tensors.items():
                where = placed.get(f"{path}.{name}" if path else name)
                tensors[name] = None if x is None else _whole(x, where)
        values["set_extra_state"] = partial(extra.__setitem__, part)
        before[path], twin = values, object.__new__(type(part))
        vars(twin).update(values)
        drop_hooks(twin)
        hooks: Any = twin._load_state_dict_pre_hooks
        for number, hook in hooks.items():
            if getattr(hook, "with_module", False):
                hooks[number] = type(hook)(hook.hook, twin)
        twins[part] = twin
    for part in module.modules():
        twins[part]._modules.update((name, twins[m]) for name, m in part._modules.items())
    root = twins[module]
    state: Any = OrderedDict(
        (k, x.detach() if isinstance(x, torch.Tensor) else x) for k, x in state_dict.items()
    )
    state._metadata = copy.deepcopy(getattr(state_dict, "_metadata", None))
    keys = root.load_state_dict(state, strict=False, assign=True)
    tensors = dict(root.named_parameters(remove_duplicate=False))
    tensors.update(root.named_buffers(remove_duplicate=False))
    of_torch = vars(nn.Module()).keys()
    attributes: dict[str, dict[str, Any]] = {}
    for path, part in module.named_modules():
        values, old = vars(twins[part]), vars(part)
        attributes[path] = {
            k: v
            for k, v in values.items()
            if v is not before[path].get(k)
            or (type(v) in _COPIED and k not in of_torch and differ(v, contents_of(old[k])))
        }
    return tensors, extra, attributes, keys


def _whole(x: torch.Tensor, placed: ParameterPlacement | None) -> torch.Tensor:
    if placed is None and type(x) in (torch.Tensor, nn.Parameter):
        whole = x.detach()
    else:
        shape = x.shape if placed is None else placed.shape
        whole = torch.empty(shape, dtype=x.dtype, device="meta")
    return nn.Parameter(whole, requires_grad=False) if isinstance(x, nn.Parameter) else whole


def migrations_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Return the functions of the modules that take part in loading, beside torch's for all."""
    for part in module.modules():
        own = getattr(type(part), nn.Module._load_from_state_dict.__name__)
        if own is not nn.Module._load_from_state_dict:
            yield own
        for hooks in (part._load_state_dict_pre_hooks, part._load_state_dict_post_hooks):
            yield from (getattr(hook, "hook", hook) for hook in hooks.values())


def finish_loading(module: nn.Module) -> None:
    """Run the hooks that modules have registered for the end of loading."""
    for part in module.modules():
        for hook in part._load_state_dict_post_hooks.values():
            hook(part, _IncompatibleKeys([], []))
