"""Channels-last: as in torch, the output of a layer has the memory format of its input."""

from __future__ import annotations

import torch
from torch._prims_common import suggest_memory_format

_FORMS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last_form(x: torch.Tensor) -> torch.memory_format | None:
    """Return the channels-last format of ``x``, or ``None`` if ``x`` is not channels-last."""
    form = _FORMS.get(x.dim())
    # The first test is much cheaper than the second, and excludes almost all contiguous tensors.
    if form is None or x.stride(1) != 1 or suggest_memory_format(x) != form:
        return None
    return form


def in_form(x: torch.Tensor, form: torch.memory_format | None) -> torch.Tensor:
    """Return ``x`` in the memory format ``form``, or ``x`` itself if ``form`` is ``None``."""
    return x if form is None else x.to(memory_format=form)
