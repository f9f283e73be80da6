"""The judge: a network alone, and converted on several workers, in everything that users can see.

Compared are, for two sizes of the input, in training and in evaluation, with and without a graph:
the structure of the output, every tensor in it, whether it requires grad, gradients of inputs and
of all parameters by name, and buffers. Everything is computed in float64. Two numbers are equal if
they differ by at most ``TOLERANCE`` of the largest number in their group. A group is a tensor for
outputs and buffers. For gradients it is all inputs or all parameters, since some gradients are sums
to zero.

Ranks are threads of one process. They share torch's default dtype (set here, for all), module
globals and caches of functions, but not the generator: each has its own state of torch's. Entries
that keep state in the process run in processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gpudist.errors import CollectiveTimeout, GpudistError, PeerFailure, PlanMismatch
from gpudist.testing import run_distributed
from gpudist.testing.rank_pool import RanksFailed
from gpudist.world.partition import Partition
from tests.default_dtype import float64_by_default
from tests.hazards.entries import TOLERANCE, Entry, Grid, workers
from tests.hazards.subjects import Alone, Converted, Subject
from tests.hazards.trees import leaves
from tests.patience import allowed_s
from tests.pool import the_pool

LIMIT_S = 40.0
# Sums that are zero, such as the gradient of a shift before a norm, keep roundings of their terms.
_ROUNDING = 1e-12
PHASES = (
    ("train", False, True),
    ("train", True, True),
    ("eval", False, True),
    ("eval", True, False),
)
How = Literal["right", "wrong", "refused", "failed"]


@dataclass
class Record:
    """Observable result of one call: outputs by path, and groups of tensors by name."""

    outputs: dict[str, Any] = field(default_factory=dict)
    needs_grad: dict[str, bool] = field(default_factory=dict)
    groups: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """``wrong``: a number, name or structure differs. ``refused``: by an error of gpudist's own.

    ``failed``: by any other error, which is neither a silent mistake nor a clear refusal.
    """

    how: How
    text: str = ""

    def __str__(self) -> str:
        return f"{self.how}: {self.text}" if self.text else self.how


def judge(
    entry: Entry,
    grid: Grid,
    subject: type[Subject] = Converted,
    transport: Literal["loopback", "host"] = "loopback",
) -> Verdict:
    """Judge ``entry`` on ``grid``, in a world of its own."""
    limit_s = allowed_s(LIMIT_S)
    with in_float64():
        expected = None if entry.random else records(entry, Alone(entry, None))
        try:
            if expected is None:
                one = (1,) * len(grid)
                expected = run_distributed(_records_on, 1, entry, one, subject, timeout=limit_s)[0]
            args = (entry, grid, subject, expected)
            if transport == "loopback":
                found = run_distributed(_differences, workers(grid), *args, timeout=limit_s)
            else:
                found = the_pool().run(
                    workers(grid), _differences, args, limit_s=limit_s, transport=transport
                )
        except RanksFailed as failed:
            return verdict_of(failed.root.error or failed)
        except Exception as error:
            return verdict_of(error)
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
    return Verdict("wrong", "; ".join(wrong[:4])) if wrong else Verdict("right")


def _records_on(
    P_world: Partition, entry: Entry, grid: Grid, subject: type[Subject]
) -> list[Record]:
    with in_float64():
        P_x = P_world.create_cartesian_topology_partition(grid)
        return records(entry, subject(entry, P_x))


def _differences(
    P_world: Partition, entry: Entry, grid: Grid, subject: type[Subject], expected: list[Record]
) -> list[str]:
    found = _records_on(P_world, entry, grid, subject)
    pairs = zip(expected, found, strict=True)
    return [text for pair in pairs for text in compared(*pair, entry.tolerance)]


def verdict_of(error: BaseException) -> Verdict:
    """Refused if gpudist itself raised, and not because ranks lost each other."""
    longest = None if isinstance(error, CollectiveTimeout) else 500  # of a hang, all stacks
    text = f"{type(error).__name__}: {str(error).strip()[:longest]}"
    lost = isinstance(error, CollectiveTimeout | PeerFailure | PlanMismatch)
    if isinstance(error, GpudistError) and not lost:
        return Verdict("refused", text)
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = traceback.tb_frame.f_globals.get("__name__", "") if traceback is not None else ""
    meant = isinstance(error, NotImplementedError | RuntimeError | TypeError | ValueError)
    if where.startswith("gpudist.") and meant and not lost:
        return Verdict("refused", text)
    return Verdict("failed", f"{text} (in {where or 'torch'})")


@contextmanager
def in_float64() -> Iterator[None]:
    """Torch's default dtype, of the whole process; warnings of gathered functions are no matter."""
    with warnings.catch_warnings(), float64_by_default():
        warnings.simplefilter("ignore")
        yield


def records(entry: Entry, subject: Subject) -> list[Record]:
    """Return the observable result of ``subject`` in each phase."""
    return [
        _record(entry, subject, mode, second, with_graph, number)
        for number, (mode, second, with_graph) in enumerate(PHASES)
        if mode in entry.modes
    ]


def _record(
    entry: Entry, subject: Subject, mode: str, second: bool, with_graph: bool, number: int
) -> Record:
    net = subject.network
    net.train(mode == "train")
    net.zero_grad(set_to_none=True)
    values = subject.leaves(entry.draw(second, 100 + number), with_graph)
    torch.manual_seed(7 + number)
    record = Record()
    with nullcontext() if with_graph else torch.no_grad():
        found = leaves(subject.call(values))
    for path, value in found.items():
        is_tensor = isinstance(value, torch.Tensor)
        record.outputs[path] = subject.whole(value).detach().clone() if is_tensor else value
        if is_tensor:
            record.needs_grad[path] = value.requires_grad
    if with_graph and any(record.needs_grad.values()):
        chosen = [found[path] for path, needs in record.needs_grad.items() if needs]
        loss = sum(subject.weighted(y, _weights(i, y)) for i, y in enumerate(chosen))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        record.groups["gradient of input"] = subject.input_gradients(values)
        record.groups["gradient of parameter"] = {
            name: subject.parameter_gradient(p) for name, p in net.named_parameters()
        }
    for name, buffer in net.named_buffers():
        record.groups[f"buffer {name}"] = {"": subject.whole(buffer).detach().clone()}
    return record


def _weights(number: int, y: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(tuple(y.shape), dtype=torch.float64, generator=generator)


def compared(expected: Record, found: Record, tolerance: float = TOLERANCE) -> Iterator[str]:
    """Say what differs."""
    if list(expected.outputs) != list(found.outputs):
        others = [path for path in found.outputs if path not in expected.outputs]
        missing = [path for path in expected.outputs if path not in found.outputs]
        yield f"outputs {others or 'in another order'}, expected {missing}"
        return
    for path, value in expected.outputs.items():
        yield from _alike(f"output{path}", value, found.outputs[path], tolerance)
        with_graph = "gradient of parameter" in expected.groups
        if with_graph and expected.needs_grad.get(path) != found.needs_grad.get(path):
            yield f"output{path}: requires grad is {found.needs_grad.get(path)}"
    if expected.groups.keys() != found.groups.keys():
        yield f"has {sorted(found.groups)}, expected {sorted(expected.groups)}"
        return
    for what, group in expected.groups.items():
        if list(group) != list(found.groups[what]):
            yield f"{what}: named {list(found.groups[what])}, expected {list(group)}"
            return
        largest = max((_largest(t) for t in group.values()), default=0.0)
        for name, tensor in group.items():
            yield from _alike(
                f"{what} {name}", tensor, found.groups[what][name], tolerance, largest
            )


def _alike(
    what: str, expected: Any, found: Any, tolerance: float, largest: float | None = None
) -> Iterator[str]:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        if type(expected) is not type(found) or expected != found:
            yield f"{what}: {found!r:.80}, expected {expected!r:.80}"
        return
    if expected.shape != found.shape or expected.dtype != found.dtype:
        yield (
            f"{what}: {list(found.shape)} {found.dtype}, "
            f"expected {list(expected.shape)} {expected.dtype}"
        )
        return
    if not (expected.is_floating_point() or expected.is_complex()):
        count = int((expected != found).sum())
        if count:
            yield f"{what}: {count} of {expected.numel()} differ"
        return
    # Of what a forward brings to fewer bits, some roundings.
    relative = max(tolerance, 64 * torch.finfo(expected.dtype).eps)
    allowed = relative * (_largest(expected) if largest is None else largest)
    same = expected.isfinite() == found.isfinite()
    error = torch.where(same & expected.isfinite(), (expected - found).abs(), 0.0)
    worst = float(error.max()) if error.numel() else 0.0
    if not bool(same.all()):
        yield f"{what}: {int((~same).sum())} of {same.numel()} are not finite where others are"
    elif worst > allowed + _ROUNDING:
        count = int((error > allowed + _ROUNDING).sum())
        yield f"{what}: {count} of {error.numel()} off by up to {worst:.2e} (allowed {allowed:.1e})"


def _largest(t: torch.Tensor) -> float:
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return 0.0
    return float(t.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
