"""Random batches, the same on every rank that draws from the same seed, and their comparison."""

from __future__ import annotations

import dataclasses
import enum
import math
import random
import struct
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gpudist.batch.leaves import DTYPES

# Torch knows few operations on them.
_BITS_ONLY = {dtype for dtype in DTYPES if "float8" in str(dtype) or "float4" in str(dtype)}


@dataclasses.dataclass
class Sample:
    """Return type of a user's collate function."""

    x: Any
    y: Any = None


class Outer:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Frozen:
        first: Any
        second: Any = dataclasses.field(default=0, init=False)

        def __post_init__(self) -> None:
            raise AssertionError("no code of a class runs when it is made again")


class Point(NamedTuple):
    a: Any
    b: Any


class Encoding(UserDict[Any, Any]):
    """Mapping that looks up attributes among its items, as those of tokenizers do."""

    def __init__(self, data: Any, sequences: Any = None) -> None:
        super().__init__(data)
        self._sequences = sequences

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Named(dict[Any, Any]):
    """Dict with an attribute, whose own methods must not run when it is made again."""

    def __init__(self, items: Any, name: Any) -> None:
        dict.__init__(self, items)
        self.__dict__["name"] = name

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("no code of a class runs when it is made again")

    name = property()  # Neither read nor set.


class Closed(Mapping[Any, Any]):
    """Mapping that is neither a dict nor a UserDict."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self._items = items

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Split(enum.Enum):
    TRAIN = "train"
    TEST = (1, 2)
    LAST = TRAIN


class Level(enum.IntEnum):
    LOW = 1


class Flags(enum.Flag):
    A = 1
    B = 2


def frozen(first: Any, second: Any) -> Outer.Frozen:
    """Return an object made without its ``__post_init__``."""
    made = object.__new__(Outer.Frozen)
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


def array(draw: random.Random) -> Any:
    """Return a NumPy array, not always contiguous or writeable, or a scalar."""
    dtypes = [np.dtype(kind) for kind in "?bBhHiIlLefdFD"]
    dtype = draw.choice(dtypes)
    shape = [draw.randrange(4) for _ in range(draw.randrange(4))]
    data = bytes(draw.randrange(2) for _ in range(math.prod(shape) * dtype.itemsize))
    x = np.frombuffer(data, dtype).reshape(shape)
    if draw.randrange(3) == 0:
        return np.frombuffer(bytes(dtype.itemsize), dtype)[0]
    return draw.choice([x, x.T, x[::-1] if shape else x, x.copy()])


def jagged(draw: random.Random) -> Any:
    """Return a nested tensor of layout ``jagged``, perhaps transposed or with holes."""
    rows = [torch.randn(draw.randrange(1, 4), 3) for _ in range(draw.randrange(1, 4))]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    kind = draw.randrange(4)
    if kind == 0:
        return x.transpose(1, 2)
    if kind == 1:
        lengths = torch.ones(len(rows), dtype=torch.int64)
        return torch.nested.nested_tensor_from_jagged(x.values(), x.offsets(), lengths)  # pyright: ignore
    return x


def mapping(draw: random.Random, items: dict[Any, Any], other: Any) -> Any:
    """Return a mapping of any class with these items."""
    ordered = OrderedDict(items)
    if items:
        ordered.move_to_end(next(iter(items)))
    factory = draw.choice([None, list, dict, int, str, set])
    counts = Counter(str(key) for key in items)
    makes = [defaultdict(factory, items), Named(items, other), Encoding(items, other), counts]
    return draw.choice([ordered, Closed(items), *makes])


def nest(draw: random.Random, depth: int = 4, most_items: int = 40) -> Any:
    """Containers in containers, at most ``depth`` deep."""
    kind = draw.randrange(12)
    if depth == 0 or kind < 3:
        return tensor(draw, most_items=most_items) if kind % 3 else plain(draw)
    if kind == 9:
        return draw.choice([array, jagged])(draw)
    if kind == 10:
        size = torch.Size([draw.randrange(1 << 40) for _ in range(draw.randrange(4))])
        return draw.choice([size, *Split, *Level, *Flags])

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
    items = {key(draw): inner() for _ in range(count)}
    return mapping(draw, items, inner()) if kind == 11 else items


def assert_same(got: Any, expected: Any, device: torch.device | None = None) -> None:
    """Equal in structure, types and every bit; tensors are new, contiguous and on ``device``."""
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, torch.Tensor) and expected.is_nested:
        assert (got.dtype, got.layout) == (expected.dtype, expected.layout)
        assert got.values().is_contiguous() and (device is None or got.device == device)
        rows = [[x.contiguous() for x in tensor.unbind()] for tensor in (got, expected)]
        assert_same(rows[0], rows[1])
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
    elif isinstance(expected, enum.Enum):
        assert got is expected
    elif isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.is_contiguous() and (device is None or got.device == device)
        assert bits(got) == bits(expected)
        assert got is not expected
    elif isinstance(expected, (Mapping, list, tuple)) or dataclasses.is_dataclass(expected):
        pairs = zip(_parts(got), _parts(expected), strict=True)
        for a, b in pairs:
            assert_same(a, b, device)
    elif isinstance(expected, float):
        assert struct.pack("<d", got) == struct.pack("<d", expected)
    elif isinstance(expected, complex):
        assert_same((got.real, got.imag), (expected.real, expected.imag))
    else:
        assert got == expected


def _parts(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return [*value.items(), *getattr(value, "__dict__", {}).items(), factory]
    return [*vars(value).items()] if isinstance(value, Mapping) else [*value]


def bits(x: torch.Tensor) -> bytes:
    x = x.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
