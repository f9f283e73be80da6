"""Extra state of modules (``get_extra_state``), and what else a state dict holds beside tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from gpudist.checkpoint.json_values import decode, text_of_values
from gpudist.checkpoint.moving import is_sharded
from gpudist.checkpoint.nested import assemble, entries_of
from gpudist.checkpoint.texts import failing_together, require_alike
from gpudist.errors import CheckpointError
from gpudist.sbp.global_parameter import block_of
from gpudist.world.partition import Partition

# Torch's name for it in state dicts.
_EXTRA = "_extra_state"


def modules_with_extra(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that have extra state, by its name in the state dict."""
    return {
        f"{prefix}.{_EXTRA}" if prefix else _EXTRA: part
        for prefix, part in module.named_modules(remove_duplicate=False)
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    }


def require_fillable(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Raise unless every entry of a module's state dict can be loaded.

    Raises:
        CheckpointError: if an entry is neither extra state nor a parameter or buffer whose cells
            have their own memory.
    """
    problems = list(_problems(module, state))
    if problems:
        raise CheckpointError("; ".join(problems))


def _problems(module: torch.nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    extra = modules_with_extra(module)
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    for name, value in state.items():
        if name in extra:
            kind = type(extra[name])
            if kind.set_extra_state is torch.nn.Module.set_extra_state:
                yield f"{name} cannot be loaded: {kind.__name__} has no set_extra_state; define it"
        elif name not in tensors or not isinstance(value, torch.Tensor):
            yield (
                f"{name} is a {type(value).__name__} that load cannot set; only parameters, "
                "buffers and extra state can be loaded"
            )
        elif value.layout is not torch.strided:
            yield f"{name} has the layout {value.layout}; replace it by its to_dense()"
        elif not is_sharded(value) and not _is_view(value, tensors[name]):
            yield (
                f"{name} is a copy that a hook of the state dict has made, which load cannot set; "
                "remove the hook"
            )
        elif _shares_cells(value):
            yield (
                f"{name} of shape {list(value.shape)} has strides {list(value.stride())}, so that "
                "cells share memory; replace it by its clone() or contiguous()"
            )


def _is_view(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    block = block_of(tensor)
    return (
        value is block or value.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
    )


def _shares_cells(x: torch.Tensor) -> bool:
    if x.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def extra_to_save(
    module: torch.nn.Module, state: Mapping[str, Any], P_world: Partition
) -> dict[str, Any]:
    """Return the extra state of all modules, by name. Collective over the world.

    Raises:
        CheckpointError: on every rank, if the ranks' values differ, or an entry of the state dict
            could not be loaded.
    """
    text = ""
    with failing_together(P_world, "saving the model"):
        require_fillable(module, state)
        extra = modules_with_extra(module)
        text = text_of_values({name: x for name, x in state.items() if name in extra})
    require_alike(P_world, "the modules' extra state (get_extra_state)", text)
    return {name: entries_of(decode(value)) for name, value in json.loads(text).items()}


def extra_to_load(module: torch.nn.Module, metadata: Metadata) -> dict[str, Any]:
    """Return the entries of extra state to read: ``None`` for a value, a tensor to be filled."""
    extra = modules_with_extra(module)
    return {
        full: whole_to_read(full, metadata)
        for full, path in (metadata.planner_data or {}).items()
        if len(path) > 1 and path[0] == "model" and path[1] in extra
        if full in metadata.state_dict_metadata
    }


def assemble_model(metadata: Metadata, loaded: dict[str, Any]) -> dict[str, Any]:
    """Return entries of the model, by their names in its state dict."""
    paths = metadata.planner_data or {}
    entries: dict[str, list[tuple[Any, Any]]] = {}
    for full, value in loaded.items():
        _, name, *inside = paths.get(full, ("model", full.removeprefix("model.")))
        entries.setdefault(name, []).append((tuple(inside), value))
    return {name: assemble(parts, name) for name, parts in entries.items()}


def give_extra(module: torch.nn.Module, values: Mapping[str, Any]) -> None:
    """Give modules their extra state, by its name in the state dict.

    Raises:
        CheckpointError: if a module rejects its extra state.
    """
    modules = modules_with_extra(module)
    for name, value in values.items():
        part = modules[name]
        try:
            part.set_extra_state(value)
        except Exception as error:  # The type of the error depends on the module.
            raise CheckpointError(
                f"{type(part).__name__}.set_extra_state does not take {name}: "
                f"{type(error).__name__}: {error}"
            ) from error


def whole_to_read(full: str, metadata: Metadata) -> torch.Tensor | None:
    """Return an empty tensor to be filled with a whole stored tensor; ``None`` for a value.

    Raises:
        CheckpointError: if the tensor needs more memory than its files have bytes.
    """
    about = metadata.state_dict_metadata[full]
    if not isinstance(about, TensorStorageMetadata):
        return None
    stored: Any = metadata.storage_data or {}
    parts = [stored.get(MetadataIndex(full, chunk.offsets)) for chunk in about.chunks]
    there_bytes = sum(part.length for part in parts if part is not None)
    wanted_bytes = about.size.numel() * about.properties.dtype.itemsize
    if wanted_bytes > there_bytes:
        raise CheckpointError(
            f"{full} of shape {list(about.size)} has {wanted_bytes} bytes, but its files contain "
            f"{there_bytes}; use another checkpoint, or copy it again"
        )
    return torch.empty(about.size, dtype=about.properties.dtype)
