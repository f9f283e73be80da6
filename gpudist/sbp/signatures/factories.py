"""New tensors of the shape of another: ``zeros_like``, ``ones_like``, ``full_like``."""

from __future__ import annotations

import torch

from gpudist.sbp.attributes import broadcast, partial_sum
from gpudist.sbp.registry import Call, Signature, register
from gpudist.sbp.signatures.elementwise import splits


@register(torch.zeros_like, torch.empty_like, any_float=True)
def zeros(call: Call, parts: int) -> list[Signature]:
    """As the other lies; terms of zero are zeros."""
    return [*splits(call), Signature((partial_sum,), (partial_sum,))]


@register(torch.ones_like, torch.full_like, any_float=True)
def numbers(call: Call, parts: int) -> list[Signature]:
    """As the other lies, whose values do not matter: copies, if it is terms."""
    return [*splits(call), Signature((partial_sum,), (broadcast,))]
