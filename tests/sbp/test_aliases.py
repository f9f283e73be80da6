"""Work in place on results that share memory with an argument in torch, and on those that do not.

Torch, on plain tensors, is the judge of its own samples: a converted network returns the same
numbers and gradients, or refuses.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.errors import GpudistError, PlanMismatch, TransportError
from gpudist.sbp.call import share_memory
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.world.partition import Partition
from tests.every import EVERY
from tests.pool import distributed
from tests.sbp.samples import MOST_CELLS, operators, samples_of

T = torch.Tensor
CHUNKS = 4
SAMPLES = 60 if EVERY else 2
WRITES: dict[str, Callable[[T, T], object]] = {
    "result": lambda x, y: y.mul_(2),
    "source": lambda x, y: x.mul_(2),
    "data": lambda x, y: y.data.mul_(2),
    "part": lambda x, y: y.view(-1)[:1].mul_(2),
    "detached": lambda x, y: y.detach().mul_(2),
}


class Writing(nn.Module):
    """Calls a function, and writes to its argument or to its first result that is a tensor."""

    def __init__(self, call: Callable[[T], Any], is_permuted: bool) -> None:
        super().__init__()
        self.call, self.is_permuted = call, is_permuted
        self.write = ""

    def forward(self, block: T) -> list[T]:
        x = block * 1
        if self.is_permuted:
            order = [*range(x.dim())][::-1]
            x = x.permute(order).contiguous().permute(order)
        ys = tensors_in(self.call(x))
        WRITES[self.write](x, ys[0])
        return [x * 1, *(y * 1 for y in ys)]


@dataclass
class Sample:
    """A call of a function, by its first tensor."""

    name: str
    x: T
    call: Callable[[T], Any]


# Functions that torch's table lacks, or has no such sample of.
OTHERS: dict[str, Callable[[T], Any]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=False),
    "the diagonal by einsum": lambda x: torch.einsum("ii->i", x),
    "columns by einsum": lambda x: torch.einsum("ij->ji", x),
    "a view of integers": lambda x: x.view(torch.int64),
    "the data of a row": lambda x: x[1].data,
    "channels last": lambda x: x[None, None].contiguous(memory_format=torch.channels_last),
}


def _samples(chunk: int) -> list[Sample]:
    """The samples of all functions that share memory in one of them; the same on all ranks."""
    x = torch.linspace(-1, 2, 16, dtype=torch.float64).view(4, 4)
    found = [Sample(name, x, call) for name, call in [*OTHERS.items()][chunk::CHUNKS]]
    for op in operators()[chunk::CHUNKS]:
        own: list[Sample] = []
        shares = False
        for sample in samples_of(op, SAMPLES)[1]:
            arguments = (sample.input, sample.args, sample.kwargs)
            x, *_ = (*tensors_in(arguments), torch.empty(0))
            if x.layout != torch.strided or not x.is_floating_point():
                continue
            if max(x.shape, default=0) < 2 or not 1 < x.numel() <= MOST_CELLS:
                continue
            call = _of_first(op.op, arguments, x)
            try:
                y = x.detach().clone()
                shares |= any(share_memory(one, y) for one in tensors_in(call(y)))
            except Exception:
                continue
            own.append(Sample(f"{op.formatted_name} of {_told(arguments)}", y, call))
        found += own if shares else []
    return found


def _of_first(function: Callable[..., Any], arguments: Any, first: T) -> Callable[[T], Any]:
    def call(x: T) -> Any:
        input, args, kwargs = map_tree(arguments, lambda one: x if one is first else one)
        return function(input, *args, **kwargs)

    return call


def _told(arguments: Any) -> str:
    return str(map_tree(arguments, lambda x: [*x.shape] if isinstance(x, T) else x))[:100]


def _run(net: Any, x: T, learns: bool) -> list[T]:
    """The results and the gradient of ``x``."""
    x = x.clone().requires_grad_(learns)
    with torch.set_grad_enabled(learns):
        ys = net(x)
    if not learns:
        return ys
    ends = [y for y in ys if y.requires_grad]
    sum((y * y.conj()).real.sum() for y in ends).backward()  # pyright: ignore
    return [*(y.detach() for y in ys), x.grad]  # pyright: ignore


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
@distributed(ranks=2, transports=["loopback"], timeout_s=600)
def test_writes_as_torch(P_world: Partition, chunk: int) -> None:
    wrong: list[str] = []
    count = {"right": 0, "refused": 0}
    ways = list(product(WRITES, (True, False), (False, True)))
    for number, sample in enumerate(_samples(chunk)):
        dims = [d for d, extent in enumerate(sample.x.shape) if extent > 1]
        for at, dim in enumerate({dims[0], dims[-1]}):
            P_x = P_world.grid(*(2 if d == dim else 1 for d in range(sample.x.dim())))
            # Each sample is written to in other ways.
            for write, learns, is_permuted in ways if EVERY else ways[(number + 7 * at) % 10 :: 10]:
                net = Writing(sample.call, is_permuted)
                net.write = write
                what = f"{sample.name}, dim {dim}, {write}, {learns}, {is_permuted}"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        expected = _run(net, sample.x, learns)
                    except Exception:
                        continue
                    verdict = _verdict(net, sample.x, learns, P_x, expected)
                if verdict in count:
                    count[verdict] += 1
                else:
                    wrong.append(f"{what}: {verdict}")
    # Views that tracebacks of refusals keep alive cost later tests frames.
    gc.collect()
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong])
    assert count["right"] > 2 * count["refused"] > 0, count


def _verdict(net: nn.Module, x: T, learns: bool, P_x: Any, expected: list[T]) -> str:
    try:
        found = _run(gpudist.distribute(net, P_x), gpudist.scatter(x, P_x), learns)
        found = [y.full_tensor() if hasattr(y, "full_tensor") else y for y in found]  # pyright: ignore
    except (PlanMismatch, TransportError):
        raise
    except (GpudistError, NotImplementedError):
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    if learns:
        found[-1] = gpudist.gather(found[-1], P_x)  # pyright: ignore
        if P_x.rank:
            found[-1] = expected[-1]
    return next(
        (
            f"number {i}: {y} instead of {e}"[:300]
            for i, (y, e) in enumerate(zip(found, expected, strict=True))
            if y.dtype != e.dtype or not torch.allclose(y, e, equal_nan=True)
        ),
        "right",
    )
