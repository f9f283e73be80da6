"""Digests of the bits of tensors, computed on their devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.checks.storage import PLAIN, storage_problem

# Words in one step: small enough for the caches of a CPU, large enough to occupy a GPU. The digest
# depends on it.
_CPU_WORDS, _DEVICE_WORDS = 1 << 16, 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# Odd constants of SplitMix64, as signed numbers; int64 arithmetic wraps around.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)


def has_bits(x: torch.Tensor) -> bool:
    """Return whether ``x`` is a plain tensor in strided memory, with values."""
    if type(x) not in PLAIN or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        return False
    return not storage_problem(x)


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a signed 64-bit number for each tensor, which depends on its bits and their order.

    Args:
        tensors: tensors that have bits, see :func:`has_bits`, of any dtype.

    Cost:
        Reads each tensor once on its device, and waits once for the device.
    """
    if not tensors:
        return []
    keys: dict[torch.device, torch.Tensor] = {}
    numbers = [_digest(_cells(x), keys) for x in tensors]
    return torch.stack([number.to(numbers[0].device) for number in numbers]).tolist()  # pyright: ignore


def digest_unless_constant(x: torch.Tensor) -> int:
    """Return the digest of ``x``; 0 if all its cells have the same bits, or none can be read.

    Cost:
        Reads the tensor twice on its device, and waits once for the device.
    """
    if not has_bits(x) or x.numel() < 2:
        return 0
    cells = _cells(x).view(x.numel(), -1)
    varies = (cells != cells[0]).any()
    return int(((_digest(cells.view(-1), {}) | 1) * varies).item())


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that has bits, in the order of its cells."""
    return _cells(x).view(torch.uint8)


def _cells(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.zeros_like(x) if x._is_zerotensor() else x
    return x.reshape(-1).contiguous().view(_WORDS[x.element_size()])


def _digest(cells: torch.Tensor, keys: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    data, device = cells.view(torch.uint8), cells.device
    words = len(data) // 8
    full = data[: 8 * words]
    if full.storage_offset() % 8:
        full = full.clone()
    step = _CPU_WORDS if device.type == "cpu" else _DEVICE_WORDS
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in (*full.view(torch.int64).split(step), data[8 * words :].long()):
        if device not in keys or len(part) > len(keys[device]):
            keys[device] = torch.arange(min(step, words + 8), device=device) * _STEP
        # Without the shift, changes of the highest bits of two words would cancel each other.
        mixed = (part ^ keys[device][: len(part)]).mul_(_FACTOR)
        mixed ^= mixed >> 32
        total = total * _FACTOR + mixed.sum()
    return total
