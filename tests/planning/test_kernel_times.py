"""Kernels are timed as the network calls them, and predictions use their times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpudist import CollectiveTimeout, ShapeError
from gpudist.planning import Profile, plan, profile_of, search, timed_kernels
from gpudist.planning.first_worker import from_first
from gpudist.planning.kernel_times import call_of, kernels_of, key_of
from gpudist.planning.rehearsal import DryNetwork
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

HERE = replace(profile_of("a100"), wire="host", kernel_us=0.0)
SHAPE, GRID = (1, 2, 8, 6), (1, 1, 2, 1)
CPU = torch.device("cpu")
aten: Any = torch.ops.aten


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 1))


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS: list[tuple[Any, Sequence[Any], dict[str, Any]]] = [
    (aten.mm.default, (on_meta(3, 4), on_meta(5, 4).t()), {}),
    (aten.add.Tensor, (on_meta(3, 4), on_meta(4)), {"alpha": 2}),
    (aten.sum.dim_IntList, (on_meta(3, 4, dtype=torch.bfloat16), [1], True), {}),
    (aten._to_copy.default, (on_meta(3, 4),), {"dtype": torch.float64}),
    (aten.embedding.default, (on_meta(7, 4), on_meta(2, 3, dtype=torch.int64)), {}),
    (aten.cat.default, ([on_meta(3, 4), on_meta(2, 4)],), {}),
    (aten.native_layer_norm.default, (on_meta(3, 4), [4], on_meta(4), None, 1e-5), {}),
    (aten.full.default, ([2, 3], 1.5), {"device": torch.device("meta"), "pin_memory": False}),
    (
        aten.convolution.default,
        (on_meta(1, 2, 9, 8, 7), on_meta(4, 2, 3, 3, 3), None, [1] * 3, [1] * 3, [1] * 3, False,
         [0] * 3, 1), {},
    ),
    (
        aten.convolution_backward.default,
        (on_meta(1, 4, 9, 8), on_meta(1, 2, 9, 8), on_meta(4, 2, 3, 3), [4], [1, 1], [1, 1],
         [1, 1], False, [0, 0], 1, [True, True, True]), {},
    ),
    (
        aten.convolution_backward.default,
        (on_meta(1, 4, 9, 8, 7), on_meta(1, 2, 9, 8, 7), on_meta(4, 2, 3, 3, 3), None, [1] * 3,
         [1] * 3, [1] * 3, False, [0] * 3, 1, [False, True, False]), {},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "args", "kwargs"), CALLS, ids=lambda x: str(x)[:30])
def test_a_kernel_is_repeated_with_the_same_shapes_and_dtypes(call: Any, args: Any, kwargs: Any):
    def facts(results: Any) -> list[Any]:
        results = results if isinstance(results, (tuple, list)) else [results]
        return [(x.shape, x.dtype) for x in results if x is not None]

    repeated: Any = call_of(key_of(call, args, kwargs), CPU)()
    assert facts(repeated) == facts(call(*args, **kwargs))
    for x in repeated if isinstance(repeated, (tuple, list)) else [repeated]:
        assert x is None or x.device == CPU


def test_strides_are_part_of_a_kernel():
    keys = {
        key_of(aten.mm.default, (x, on_meta(4, 4)), {}) for x in (on_meta(4, 4), on_meta(4, 4).t())
    }
    assert len(keys) == 2


def test_arguments_that_no_text_holds_give_no_key():
    assert key_of(aten.rand.generator, ([2],), {"generator": torch.Generator()}) == ""
    assert key_of(torch.ops.prims.add.default, (on_meta(2), on_meta(2)), {}) == ""


def test_times_replace_rates():
    keys = kernels_of(HERE, lambda p: plan(network(), SHAPE, 2, p, grid=GRID))
    assert len(set(keys)) == len(keys) > 10
    timed = replace(HERE, kernels=dict.fromkeys(keys, 1.0))
    rehearsal = DryNetwork(network(), SHAPE, timed).rehearse(GRID, 0)
    # Convolution, GELU, convolution, and others such as the sum of the bias.
    assert rehearsal.forward.terms_s["convolutions"] == 2.0
    assert rehearsal.backward.terms_s["convolutions"] == 2.0
    assert rehearsal.forward.terms_s["other kernels"] >= 1.0
    assert "kernel starts" not in rehearsal.forward.terms_s
    assert (
        rehearsal.forward.flops
        == DryNetwork(network(), SHAPE, HERE).rehearse(GRID, 0).forward.flops
    )


def test_kernels_that_cannot_be_called_are_predicted_by_rates():
    keys = kernels_of(HERE, lambda p: plan(network(), SHAPE, 2, p))
    unknown = replace(HERE, kernels=dict.fromkeys(keys, 0.0))
    assert (
        plan(network(), SHAPE, 2, unknown)[0].seconds == plan(network(), SHAPE, 2, HERE)[0].seconds
    )
    assert kernels_of(unknown, lambda p: plan(network(), SHAPE, 2, p)) == []


def timed(P_world: Partition) -> tuple[Profile, list[tuple[str, int, int]]]:
    shown: list[tuple[str, int, int]] = []

    def planned(profile: Profile) -> object:
        return search(network(), SHAPE, GRID, profile)

    profile = timed_kernels(P_world, HERE, planned, lambda *item: shown.append(item))
    assert kernels_of(profile, planned) == []
    return profile, shown


@pytest.mark.parametrize("size", [2, 3])
def test_all_workers_get_the_slowest_times(size: int, tmp_path: Path):
    results = run_distributed(timed, size)
    profiles, shown = zip(*results, strict=True)
    assert all(profile == profiles[0] for profile in profiles)
    seconds = profiles[0].kernels
    assert seconds is not None
    assert all(0 < one < 1 for one in seconds.values())
    assert shown[0][0] == (f"{len(seconds)} kernels", 0, 1)
    assert shown[0][-1] == ("", 1, 1)
    profiles[0].save(tmp_path / "profile.json")
    assert profile_of(tmp_path / "profile.json").kernels == seconds


def unplanned(P_world: Partition) -> None:
    def planned(profile: Profile) -> object:
        raise ValueError("no network")

    with pytest.raises(ShapeError, match="ValueError: no network"):
        timed_kernels(P_world, HERE, planned)


def test_a_search_that_fails_on_the_first_worker_raises_on_all():
    run_distributed(unplanned, 2)


def plan_for(P_world: Partition, seconds: float) -> str:
    return from_first(P_world, lambda: time.sleep(seconds) or "a plan")


def test_planning_that_takes_longer_than_the_deadline() -> None:
    with pytest.raises(CollectiveTimeout, match=r"rank 0 plans for all .* most 1 s: .* timeout="):
        run_distributed(plan_for, 2, 3.0, transport="host", timeout=1)
