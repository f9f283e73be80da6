"""Results that a rehearsal repeats equal those that torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpudist.planning.clock import Repeating
from gpudist.sbp.trees import tensors_in

META = torch.device("meta")


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def with_gradients(call: Callable[..., Any], *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    leaves = [x(*shape).requires_grad_() for shape in shapes]
    y = call(*leaves)
    return [y, *torch.autograd.grad(y, leaves, torch.empty_like(y))]


CALLS: dict[str, Callable[[], Any]] = {
    "product": lambda: x(3, 4) @ x(4, 5),
    "integer": lambda: x(3, dtype=torch.int64) + 1,
    "float": lambda: x(3, dtype=torch.int64) + 1.0,
    "bool": lambda: x(3, dtype=torch.bool) + True,
    "transposed": lambda: x(3, 4).t() + 1,
    "strides": lambda: torch.empty_like(x(2, 3, 4).permute(2, 0, 1)),
    "channels last": lambda: x(2, 3, 4, 4).contiguous(memory_format=torch.channels_last) * 2,
    "dtype": lambda: x(3, 4).sum(1, dtype=torch.float64),
    "two results": lambda: x(3, 4).max(1),
    "list": lambda: torch.cat([x(2, 3), x(1, 3)]),
    "parts": lambda: x(6, 2).split(2),
    "shared": lambda: [y := x(4, 4), y.view(16), y.add_(1), y.detach()],
    "factory": lambda: [torch.zeros(3, device=META), torch.zeros(3, device="cpu")],
    "new": lambda: [x(3).new_zeros(2), x(3).new_zeros(2, device="cpu")],
    "convolution": lambda: with_gradients(F.conv2d, (2, 3, 8, 8), (4, 3, 3, 3)),
    "norm": lambda: with_gradients(lambda a, w: F.layer_norm(a, (4,), w), (3, 4), (4,)),
    "activation": lambda: with_gradients(lambda a: F.gelu(a).softmax(1), (3, 4)),
    "fft": lambda: torch.fft.rfft(x(2, 8)),
}


def facts(result: Any) -> list[Any]:
    """Return shape, strides, dtype, device and memory of each tensor, and which share memory."""
    tensors = tensors_in(result)
    places = [y.untyped_storage()._cdata for y in tensors]
    return [
        (y.shape, y.stride(), y.dtype, y.device, y.untyped_storage().nbytes(), places.index(place))
        for y, place in zip(tensors, places, strict=True)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_results_are_torchs(name: str) -> None:
    expected = facts(CALLS[name]())
    # The first call may compute what the others repeat.
    for _ in range(3):
        with Repeating():
            assert facts(CALLS[name]()) == expected


def test_arguments_that_compare_equal_are_told_apart() -> None:
    with Repeating():
        found = [(x(3, dtype=torch.int64) * factor).dtype for factor in (1, 1.0, True, 1)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_the_default_dtype_counts() -> None:
    kinds = torch.float32, torch.float64
    before, found = torch.get_default_dtype(), list[torch.dtype]()
    try:
        for kind in kinds:
            torch.set_default_dtype(kind)
            with Repeating():
                found.append((x(3, dtype=torch.int64) / 2).dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [*kinds]


def test_values_are_computed() -> None:
    with Repeating():
        found = [(torch.tensor([1.0, 2.0]) * factor).tolist() for factor in (1, 1, 3)]
    assert found == [[1.0, 2.0], [1.0, 2.0], [3.0, 6.0]]


def test_equal_calls_are_computed_once() -> None:
    names: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            names.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    a = x(3, 17, 5)
    with Count(), Repeating():
        for _ in range(3):
            a.softmax(1)
            a.add_(1)
    assert names.count("_softmax") == 1
    assert names.count("add_") == 3
