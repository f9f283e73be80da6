"""Dtypes under autocast: those of torch's functions, for every function of the table."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gpudist
from gpudist.sbp import GlobalTensor, Placement
from gpudist.sbp.call import Call, Spec, as_call
from gpudist.sbp.registry import signatures
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, assert_matches, global_of
from tests.sbp.parts import B, S, random
from tests.sbp.samples import MOST_CELLS, operators, samples_of, stand_in_for_expecttest
from tests.sbp.test_samples import KNOWN

pytestmark = pytest.mark.filterwarnings("ignore")
LOW = (torch.bfloat16, torch.float16)
CHUNKS = 8


@pytest.mark.one_in(4)
@pytest.mark.parametrize("chunk", range(CHUNKS))
@distributed(ranks=2, transports=("loopback",), timeout_s=200)
def test_every_function(P_world: Partition, chunk: int) -> None:
    """On torch's samples, in single precision and in a 16-bit dtype; also the gradients' dtypes."""
    wrong: list[str] = []
    seen: set[str] = set()
    for number, op in enumerate(operators()[chunk::CHUNKS]):
        if op.name in KNOWN or op.name.startswith("masked."):
            continue
        if torch.float32 not in op.supported_dtypes("cpu"):
            continue
        low = LOW[number % 2]
        for dtype in (torch.float32, low):
            wrong += _differences(P_world, op, dtype, low, seen)
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 25, seen


def _differences(
    P_world: Partition, op: Any, dtype: torch.dtype, low: torch.dtype, seen: set[str]
) -> list[str]:
    placement = Placement("cpu", range(P_world.size), P_world)
    learns, samples = samples_of(op, 1)
    wrong: list[str] = []
    for sample in samples[:1]:
        call = (sample.input, *sample.args), sample.kwargs
        given = tensors_in(call)
        strided = all(x.layout == torch.strided for x in given)
        if not given or not strided or sum(x.numel() for x in given) > MOST_CELLS:
            continue
        whole = [x.detach().clone().to(dtype) if x.is_floating_point() else x for x in given]
        for x in whole:
            x.requires_grad_(learns and x.is_floating_point())
        dims = given[0].dim()
        sbps = [(S(dims - 1) if i == 0 and dims else B,) for i in range(len(given))]
        parts = [
            global_of(x, placement, sbp, x.requires_grad)
            for x, sbp in zip(whole, sbps, strict=True)
        ]
        with torch.autocast("cpu", low):
            try:
                expected = tensors_in(_called(op, call, whole))
            except Exception:
                continue  # Torch refuses this dtype.
            try:
                found = tensors_in(_called(op, call, parts))
            except NotImplementedError:
                continue
        seen.add(op.formatted_name)
        what = f"{op.formatted_name} of {dtype} under {low}"
        for y, x in zip(found, expected, strict=True):
            if isinstance(y, GlobalTensor):
                wrong += _unlike(what, (y.dtype, y.to_local().dtype), x.dtype)
        if not wrong:
            wrong += _of_gradients(f"gradient of {what}", found, expected, parts, whole)
    return wrong


def _called(op: Any, call: Any, xs: list[Any]) -> Any:
    left = iter(xs)
    args, kwargs = map_tree(call, lambda x: next(left) if isinstance(x, torch.Tensor) else x)
    return op.op(*args, **kwargs)


def _unlike(what: str, found: tuple[torch.dtype, ...], expected: torch.dtype) -> list[str]:
    return [] if set(found) == {expected} else [f"{what}: {found}, torch's {expected}"]


def _of_gradients(
    what: str, found: list[Any], expected: list[Any], parts: list[Any], whole: list[Any]
) -> list[str]:
    ends = [i for i, x in enumerate(expected) if x.requires_grad and not x.dtype.is_complex]
    starts = [i for i, x in enumerate(whole) if x.requires_grad]
    if not ends or not starts:
        return []
    seeds = [torch.ones_like(expected[i].detach()) for i in ends]
    try:
        theirs = torch.autograd.grad(
            [expected[i] for i in ends], [whole[i] for i in starts], seeds, allow_unused=True
        )
    except RuntimeError:
        return []  # Torch has no gradient of these dtypes.
    ours: Any = torch.autograd.grad(
        [found[i] for i in ends], [parts[i] for i in starts], seeds, allow_unused=True
    )
    pairs = [(g, e) for g, e in zip(ours, theirs, strict=True) if g is not None and e is not None]
    return [text for g, e in pairs for text in _unlike(what, (g.dtype,), e.dtype)]


ENTROPIES: dict[str, Any] = {
    "cross entropy": (F.cross_entropy, torch.tensor([1, 0, 2, 1])),
    "smoothed": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), torch.tensor([1, 0, -100, 1]),
    ),
    "nll": (F.nll_loss, torch.tensor([1, 0, 2, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTROPIES)
@pytest.mark.parametrize("low", LOW)
@distributed(ranks=2, transports=("loopback",))
def test_losses_have_the_numbers_of_single_precision(
    P_world: Partition, name: str, low: torch.dtype
) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    (function, target), logits = ENTROPIES[name], random((4, 3)).to(low)
    for sbp in (S(0), S(1), B):
        whole = logits.clone().requires_grad_()
        x: Any = global_of(logits, placement, (sbp,), True)
        y: Any = global_of(target, placement, (S(0) if sbp == S(0) else B,))
        with torch.autocast("cpu", low):
            expected, found = function(whole, target), function(x, y)
        assert_global(found, expected)
        (gradient,) = torch.autograd.grad(expected, whole)
        (ours,) = torch.autograd.grad([found], [x])
        assert_global(ours, gradient)


@distributed(ranks=2, transports=("loopback",))
def test_calls_are_not_repeated_in_the_dtypes_of_others(P_world: Partition) -> None:
    """Without autocast, under it, and under that of another dtype."""
    placement = Placement("cpu", [0, 1], P_world)
    x: Any = global_of(random((4, 6)).float(), placement, (S(0),))
    weight: Any = global_of(random((3, 6)).float(), placement, (B,))
    low: Any = global_of(random((4, 6)).bfloat16(), placement, (S(0),))
    for _ in range(2):
        assert F.linear(x, weight).dtype == torch.float32
        assert low.prod(0).dtype == torch.bfloat16
        for dtype in LOW:
            with torch.autocast("cpu", dtype):
                assert F.linear(x, weight).dtype == dtype
                assert low.prod(0).dtype == torch.float32


# --- Lists of the GPU ---------------------------------------------------------------------------


@contextmanager
def autocast_of_gpus(low: torch.dtype) -> Generator[None]:
    """Autocast for CUDA, also where there is no GPU."""
    torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


@pytest.mark.parametrize("low", LOW)
def test_lists_of_the_gpu(low: torch.dtype) -> None:
    """Results have the dtypes that torch's own tests of autocast require of its functions."""
    stand_in_for_expecttest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.autocast_test_lists import AutocastTestLists

        lists = AutocastTestLists(torch.device("cpu"))
    seen: set[str] = set()
    rows: Any = [(row, torch.float32) for row in (*lists.torch_fp32, *lists.nn_fp32)]
    rows += [(row, low) for row in lists.torch_fp16]
    for (name, args, *rest), expected in rows:
        if isinstance(args, str):  # einsum's equation, before its operands
            args = (args, *rest[0])
        for function in (getattr(torch, name, None), getattr(F, name, None)):
            if function is None or function not in signatures:
                continue
            slots, named, tensors = as_call(function, args, {})
            specs = tuple(Spec(tuple(x.shape), x.dtype) for x in tensors)
            specs = tuple(Spec(s.shape, low) if s.dtype in LOW else s for s in specs)
            with autocast_of_gpus(low):
                try:
                    found = Call(function, slots, named, specs, "cuda").outputs
                except (RuntimeError, ValueError):
                    continue  # Torch refuses the arguments, or would use memory of a GPU.
            assert {one.dtype for one in found} == {expected}, name
            seen.add(name)
    assert len(seen) > 40, seen


ON_GPUS: dict[str, Any] = {
    "softmax": lambda x: F.softmax(x, 1),
    "softmin": lambda x: F.softmin(x, 1),
    "layer norm": lambda x: F.layer_norm(x, [6]),
    "group norm": lambda x: F.group_norm(x, 2),
    "norm": lambda x: x.norm(dim=1),
    "mean": lambda x: x.mean(1),
    "cosine": lambda x: F.cosine_similarity(x, x + 1, 1),
    "max": lambda x: x.amax(1),
}


class OnGpus(Placement):
    """Placement of CPUs under the autocast of GPUs."""

    autocast = "cuda"  # pyright: ignore


@distributed(ranks=2, transports=("loopback",))
def test_functions_on_split_dims_follow_the_lists_of_the_gpu(P_world: Partition) -> None:
    """Compositions over several workers have the dtype that torch's function has on a GPU."""
    placement = OnGpus("cpu", [0, 1], P_world)
    single = {"softmax", "softmin", "layer norm", "group norm", "norm", "cosine"}
    x: Any = global_of(random((4, 6)).bfloat16(), placement, (S(1),))
    for name, function in ON_GPUS.items():
        with autocast_of_gpus(torch.bfloat16):
            found = function(x)
        expected = torch.float32 if name in single else torch.bfloat16
        assert found.dtype == found.to_local().dtype == expected, name


class _Layers(torch.nn.Module):
    """Residuals in float32, to which layers add results that autocast computes in 16 bits.

    The layers join batch and sequence, so that no block of the sequence stays one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x.view(-1, 8)).view(x.shape)
        return x


@distributed(ranks=2, transports=("loopback",))
def test_layouts_do_not_depend_on_it(P_world: Partition) -> None:
    """Else a residual and what is added to it move to and fro between layers."""
    found: list[tuple[Any, int]] = []
    torch.manual_seed(0)
    P_x = P_world.create_cartesian_topology_partition([1, 2, 1])
    network = gpudist.distribute(_Layers(), P_x, inputs={"x": "block"})
    torch.manual_seed(P_world.rank or 0)
    x = torch.randn(2, 4, 8)
    for enabled in (False, True):
        network(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            network(x)
            gpudist.stats(reset=True)
            y: Any = network(x)
        found.append((y.sbp, gpudist.stats().total.calls))
    assert found[0] == found[1]


@distributed(ranks=2, transports=("loopback",))
def test_tensors_of_two_dtypes_are_joined_along_their_split_dim(P_world: Partition) -> None:
    """A class token in float32 and patches in bfloat16, for example; also without autocast."""
    placement = Placement("cpu", [0, 1], P_world)
    token, patches = random((2, 1, 4)).float(), random((2, 8, 4), 1)
    for dtype, is_on in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float64, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            given = [token, patches.to(dtype)]
            (y,) = assert_matches(lambda *xs: torch.cat(xs, 1), given, placement, [(B,), (S(1),)])
        assert y.sbp == (S(1),)
