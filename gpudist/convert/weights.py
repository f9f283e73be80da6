"""From a converted network back to the sequential one."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gpudist.arguments import checked
from gpudist.convert.network import conversion_of, undone
from gpudist.errors import ConversionError


@checked(ConversionError)
def sequential(distributed: torch.nn.Module, root: int | None = None) -> torch.nn.Module | None:
    """The network that :func:`distribute` was given, with the weights of now.

    Collective over the partition that was given to :func:`distribute`.

    Args:
        distributed: what :func:`distribute` returned.
        root: rank in that partition of the worker that gets it; all of them unless given.

    Returns:
        A network of the original class, on the partition's device; ``None`` on workers that do not
        get it.

    Cost:
        A copy; of weights that the plan split, an all-gather.

    Raises:
        ConversionError: ``distributed`` is not the result of :func:`distribute`.
    """
    conversion: Any = conversion_of(distributed)
    if not conversion.P_x.active:
        return None
    wholes = {
        (weight.path, name): weight.as_global(name, own.detach()).full_tensor()
        for weight in conversion.parameters.split_weights
        for name, own in weight.layer.named_parameters(recurse=False)
    }
    if root is not None and conversion.P_x.rank != root:
        return None
    made = undone(copy.deepcopy(distributed))
    for (path, name), whole in wholes.items():
        layer = made.get_submodule(path)
        needs = layer._parameters[name].requires_grad  # pyright: ignore
        layer._parameters[name] = torch.nn.Parameter(whole.clone(), needs)
        vars(layer).pop("_placements", None)
    return made
