"""Random batches, the same on every rank that draws from the same seed, and their comparison."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
import warnings
from typing import Any, NamedTuple

import torch

from gpudist.batch.leaves import DTYPES

# Torch knows few operations on them.
_BITS_ONLY = {dtype for dtype in DTYPES if "float8" in str(dtype) or "float4" in str(dtype)}


@dataclasses.dataclass
class Sample:
    """Return type of a user's collate function."""

    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        raise AssertionError("no code of a class runs when it is made again")


class Point(NamedTuple):
    a: Any
    b: Any


def frozen(first: Any, second: Any) -> Frozen:
    """Return an object made without its ``__post_init__``."""
    made = object.__new__(Frozen)
    object.__setattr__(made, "first", first)
    object.__setattr__(made, "second", second)
    return made


def tensor(draw: random.Random, dtype: torch.dtype | None = None, most_items: int = 40) -> Any:
    """Return a tensor of 0 to 8 dims with random bits, often empty, often not contiguous."""
    dtype = draw.choice(DTYPES) if dtype is None else dtype
    dims = draw.choice([0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8])
    shape: list[int] = []
    for _ in range(dims):
        left = most_items // max(1, math.prod(shape))
        shape.append(draw.choice([0, 1, 1, draw.randint(1, max(1, left))]))
    x = _bits(draw, shape, dtype)
    if dims < 1 or dtype in _BITS_ONLY:
        return x
    layout = draw.randrange(4)
    if layout == 1:
        return x.permute(*draw.sample(range(dims), dims))
    if layout == 2:
        return torch.stack([x, x], -1)[..., 0]
    if layout == 3 and x.shape[0] == 1:
        return x.expand(draw.randint(0, 3), *x.shape[1:])
    return x


def _bits(draw: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    data = draw.randbytes(count * dtype.itemsize)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of float16's complex numbers
        flat = torch.empty(count, dtype=dtype)
        if count:
            flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return flat.view(shape)


def plain(draw: random.Random) -> Any:
    return draw.choice(
        [
            None, True, False, 0, -1, 255, -(2 ** draw.randint(0, 200)), 2 ** draw.randint(0, 200),
            0.0, -0.0, math.inf, math.nan, draw.random(), complex(draw.random(), -1), "", "text",
            "\u20ac\U0001f600" * draw.randint(0, 3), "\ud800", b"", draw.randbytes(5),
        ]
    )  # fmt: skip


def key(draw: random.Random) -> Any:
    text = f"k{draw.randrange(1000)}"
    return draw.choice([text, draw.randint(-300, 300), (text, 1), (), b"k", None, True, 2.5])


def nest(draw: random.Random, depth: int = 4, most_items: int = 40) -> Any:
    """Containers in containers, at most ``depth`` deep."""
    kind = draw.randrange(9)
    if depth == 0 or kind < 3:
        return tensor(draw, most_items=most_items) if kind % 3 else plain(draw)

    def inner() -> Any:
        return nest(draw, depth - 1, most_items)

    count = draw.randrange(4)
    if kind == 3:
        return [inner() for _ in range(count)]
    if kind == 4:
        return tuple(inner() for _ in range(count))
    if kind == 5:
        return Sample(inner(), inner())
    if kind == 6:
        return frozen(inner(), inner())
    if kind == 7:
        return Point(inner(), inner())
    return {key(draw): inner() for _ in range(count)}


def assert_same(got: Any, expected: Any, device: torch.device | None = None) -> None:
    """Equal in structure, types and every bit; tensors are new, contiguous and on ``device``."""
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.is_contiguous() and (device is None or got.device == device)
        assert bits(got) == bits(expected)
        assert got is not expected
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        assert [type(k) for k in got] == [type(k) for k in expected]
        for name in expected:
            assert_same(got[name], expected[name], device)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b, device)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(got, field.name), getattr(expected, field.name), device)
    elif isinstance(expected, float):
        assert struct.pack("<d", got) == struct.pack("<d", expected)
    elif isinstance(expected, complex):
        assert_same((got.real, got.imag), (expected.real, expected.imag))
    else:
        assert got == expected


def bits(x: torch.Tensor) -> bytes:
    x = x.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
