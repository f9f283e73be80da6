"""Forwards by Python's own means: functools, itertools, contextlib, closures, generators."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import itertools
import math
import operator
import types
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE, TOKENS, SIGNAL = "x: B C H W", "x: B T D", "x: B C L"


class Conv(nn.Module):
    """A convolution first, so that its output is not a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


@forward(IMAGE)
class FoldedByFunctools(Conv):
    """``reduce``, ``partial``, ``itemgetter`` and ``methodcaller`` over a list of features."""

    def forward(self, x):
        halve = functools.partial(F.avg_pool2d, kernel_size=2, ceil_mode=True)
        features = [x, self.conv(x), self.conv(x).sin()]
        low = functools.reduce(operator.add, map(halve, features))
        first, last = operator.itemgetter(0, -1)(features)
        return low, functools.reduce(torch.maximum, features), first * last.tanh() + math.prod([2])


@forward(IMAGE)
class ChunksByItertools(nn.Module):
    """``pairwise``, ``accumulate``, ``product``, ``zip_longest`` and ``chain`` over chunks."""

    def forward(self, x):
        rows = x.chunk(3, dim=2)
        steps = [b.mean(2) - a.mean(2) for a, b in itertools.pairwise(rows)]
        sums = list(itertools.accumulate(x.unbind(1)))
        corners = [
            x[..., i::2, j::2].amax((2, 3)) for i, j in itertools.product(range(2), repeat=2)
        ]
        longest = [
            a.sum() if b is None else (a * 2).sum()
            for a, b in itertools.zip_longest(rows, sums[:2])
        ]
        return list(itertools.chain(steps, corners, longest)), torch.stack(sums, 1)


@contextlib.contextmanager
def evaluating(module):
    """The module in evaluation while the block runs."""
    was = module.training
    module.eval()
    try:
        yield module
    finally:
        module.train(was)


@forward(IMAGE)
class ContextsOfItsOwn(Conv):
    """A context manager that sets a mode, ``ExitStack``, ``suppress`` and ``nullcontext``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        normed = self.norm(y)
        with evaluating(self.norm) as norm:
            still = norm(y)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad() if self.training else contextlib.nullcontext())
            scale = y.abs().mean()
        with contextlib.suppress(RuntimeError):
            y = y.reshape(y.shape[0], 7, -1, 11, 3)
        return normed + still / scale


class Delegates(nn.Module):
    """A wrapper that passes unknown names on to what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


@forward(IMAGE)
class NamesPassedOn(Conv):
    """``__getattr__`` of a wrapper finds a weight, a size and a method of the inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Delegates(nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        y = self.conv(x) * self.conv.out_channels
        return y + F.conv2d(x, self.conv.weight.flip(3), stride=self.conv.stride, padding=1)


@forward(IMAGE)
class CachedProperty(Conv):
    """``functools.cached_property`` of a filter, and a property of what the last call saw."""

    seen = None

    @functools.cached_property
    def blur(self):
        row = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
        return torch.outer(row, row).expand(4, 1, 3, 3)

    @property
    def last_size(self):
        return None if self.seen is None else self.seen.shape[2:]

    def forward(self, x):
        before, self.seen = self.last_size, x.detach()
        y = F.conv2d(self.conv(x), self.blur, padding=1, groups=4)
        return y, before == x.shape[2:], self.last_size


@forward(IMAGE)
class Closures(Conv):
    """Nested functions with ``nonlocal``, defaults bound in a loop, and recursion."""

    def forward(self, x):
        calls = 0

        def halved(t, depth=2):
            nonlocal calls
            calls += 1
            if depth == 0 or min(t.shape[2:]) < 3:
                return self.conv(t)
            low = halved(t[:, :, ::2, ::2], depth - 1)
            return t + F.interpolate(low, size=t.shape[2:])

        shifts = [lambda t, k=k: t.roll(k, dims=k + 1) * k for k in (1, 2)]
        return halved(x), sum(shift(x) for shift in shifts), calls


@forward(IMAGE)
class MatchedShapes(Conv):
    """``match`` on a shape, on a type and on a tuple of results."""

    def forward(self, x):
        match tuple(x.shape):
            case (b, 4, h, w) if h > w:
                x = x.transpose(2, 3).reshape(b, 4, w, h)
            case _:
                x = x * 2
        match self.conv(x), self.training:
            case torch.Tensor() as y, True:
                return y.sin()
            case y, _:
                return y.cos()


@functools.singledispatch
def doubled(value):
    raise TypeError(f"no rule for {type(value)}")


@doubled.register
def _(value: torch.Tensor):
    return value * 2


@doubled.register(list)
@doubled.register(tuple)
def _(value):
    return type(value)(doubled(each) for each in value)


@doubled.register
def _(value: dict):
    return {name: doubled(each) for name, each in value.items()}


@forward(IMAGE)
class DispatchedByType(Conv):
    """``singledispatch`` on tensors and on containers of them."""

    def forward(self, x):
        y = self.conv(x)
        return doubled({"y": y, "parts": [y[:, :, 1:], (y.mean(),)]})


@forward(IMAGE)
class DictsOfFeatures(Conv):
    """A dict of levels: comprehension, ``|=``, ``pop``, ``setdefault``, sorted by size."""

    def forward(self, x):
        levels = {f"p{k}": F.max_pool2d(self.conv(x), 2**k) for k in range(3)}
        levels |= {"p3": levels.pop("p0").sigmoid()}
        levels.setdefault("p1", x)
        by_size = dict(sorted(levels.items(), key=lambda item: item[1].shape[-1]))
        *_, widest = by_size.values()
        up = {n: F.interpolate(t, widest.shape[-2:], mode="bilinear") for n, t in by_size.items()}
        return {**up, "sum": sum(up.values()), "names": list(up)}


@forward(SIGNAL, L=15)
class WalrusAndWhile(nn.Module):
    """A loop that halves until the signal is short, by an assignment in its condition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, stride=2, padding=1)

    def forward(self, x):
        found = []
        while (n := x.shape[-1]) > 3:
            found.append((x := self.conv(x).tanh()).mean(-1) / n)
        else:
            x = x * len(found)
        return x, found


class Kind(enum.Enum):
    """How features are merged."""

    SUM = "sum"
    CAT = "cat"


@forward(IMAGE)
class ChosenByName(Conv):
    """Functions by name: a dict of activations, an enum, ``getattr`` of torch and of a layer."""

    acts = {"swish": F.silu, "snake": lambda t: t + t.sin() ** 2}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.norm = Kind("cat"), getattr(nn, f"InstanceNorm{2}d")(4)

    def forward(self, x):
        y = self.norm(self.conv(x))
        parts = [act(y) for act in self.acts.values()] + [getattr(y, "hardswish", y.exp)()]
        return torch.cat(parts, 1) if self.kind is Kind.CAT else sum(parts)


@forward(IMAGE)
class GeneratorsInside(Conv):
    """Generators of levels within a forward: ``yield from``, ``next``, ``zip`` of two."""

    def levels(self, x, count):
        yield x
        if count:
            yield from self.levels(F.avg_pool2d(self.conv(x), 2), count - 1)

    def forward(self, x):
        first = next(self.levels(x, 0))
        pairs = zip(self.levels(x, 2), self.levels(-x, 2), strict=True)
        means = [(a * b).mean((2, 3)) for a, b in pairs]
        return first + next(t for t in self.levels(x, 2) if t.shape[2] < 7).mean(), means


@forward(IMAGE)
class LastFewKept(Conv):
    """A ``deque`` of the last activations, averaged, whose shape may have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.history = collections.deque(maxlen=2)

    def forward(self, x):
        y = self.conv(x)
        self.history.append(y.detach())
        alike = [t for t in self.history if t.shape == y.shape]
        return y + sum(alike) / len(alike), self.history[0].mean((0, 2, 3))


@dataclass(frozen=True)
class State:
    """Tensors and numbers that pass from layer to layer."""

    image: torch.Tensor
    context: torch.Tensor | None = None
    depth: int = 0

    def __post_init__(self) -> None:
        if self.image.ndim != 4:
            raise ValueError(f"expected 4 dims, got {self.image.ndim}")

    def __add__(self, other):
        return replace(self, image=self.image + other.image, depth=self.depth + other.depth)


@forward(IMAGE)
class FrozenDataclass(Conv):
    """A dataclass with operators and ``replace``, passed from layer to layer."""

    def forward(self, x):
        state = State(x, x.mean((2, 3), keepdim=True))
        for _ in range(2):
            state = state + replace(state, image=self.conv(state.image) * state.context, depth=1)
        return state


@forward(IMAGE)
class TextOfNumbers(Conv):
    """Numbers of a tensor in texts: ``f"{t:.3f}"``, ``%``, ``str.format``, ``round``."""

    def forward(self, x):
        y = self.conv(x).clamp(-1, 1)
        most = y.amax().round(decimals=1)
        text = f"{most:.3f} of {y.shape[2]}, %d cells, {{:.1e}}" % y.numel()
        return y, text.format(round(float(most), 1)), repr(y.shape), str(y.dtype)


@forward(IMAGE)
class BuiltinsOnTensors(Conv):
    """``sum``, ``max``, ``min``, ``abs``, ``pow``, ``sorted`` and ``any`` of Python on tensors."""

    def forward(self, x):
        y = self.conv(x)
        means = sorted((y[:, k].mean() for k in range(4)), key=float)
        low = min(y.mean(), x.mean())
        big = max([y, y[:, :, 2:], y[..., :3]], key=torch.Tensor.numel)
        there = any(t is y for t in (x, y)) and not any(t.sum() > 1e9 for t in (x, y))
        return abs(big) + pow(low, 2), torch.stack(means), sum([x, y], start=-x), there


@forward(IMAGE)
class TensorsAsKeys(Conv):
    """Tensors in a dict and a set by identity, and in a namespace."""

    def forward(self, x):
        y = self.conv(x)
        names = {x: "input", y: "output"}
        bag = types.SimpleNamespace(best=y, seen={id(x)}, **{"k": 2})
        bag.best = bag.best * bag.k if id(x) in bag.seen and y not in {x} else bag.best * 0
        return bag.best, names[y], len({x, y, x})


@forward(IMAGE)
class ErrorsChained(Conv):
    """``try`` with ``else`` and ``finally``, an own error raised from torch's, ``errors`` kept."""

    def fit(self, y, size):
        try:
            found = y.view(size)
        except RuntimeError as error:
            raise ValueError(f"cannot view {tuple(y.shape)} as {size}") from error
        else:
            return found
        finally:
            self.tried = getattr(self, "tried", 0) + 1

    def forward(self, x):
        y, errors = self.conv(x), []
        for size in ((7, 11), (x.shape[0], -1)):
            try:
                y = self.fit(y, size)
            except ValueError as error:
                errors.append(type(error.__cause__).__name__)
        return y, errors
