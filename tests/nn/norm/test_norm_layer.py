"""Distributed layer and RMS normalization over dims that are split, and over whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import Cut, assert_block_of, grid, own_block, own_slices, random_like_all
from tests.nn.norm.norm_cases import F64, Made, assert_groups, check_penalty, make_both, owner
from tests.pool import distributed

Case = tuple[Sequence[int], int, list[int], Cut | None]
CASES: dict[str, Case] = {
    "one": ((3, 4, 5), 1, [1, 1, 1], None),
    "batch": ((3, 4, 5), 1, [3, 1, 1], None),
    "sequence": ((3, 4, 5), 1, [1, 4, 1], None),
    "features": ((3, 4, 5), 1, [1, 1, 4], None),
    "mixed": ((3, 4, 5), 1, [2, 2, 2], None),
    "alone": ((7,), 1, [3], {0: [4, 0, 3]}),
    "two dims": ((3, 4, 5), 2, [2, 1, 3], None),
    "all dims": ((3, 4, 5), 3, [2, 2, 2], None),
    "one of two dims": ((2, 3, 4, 5), 2, [2, 1, 1, 4], None),
    "uneven": ((3, 4, 9), 1, [1, 2, 3], {1: [1, 3], 2: [6, 1, 2]}),
    "uneven in two": ((3, 4, 9), 2, [2, 2, 2], {0: [1, 2], 1: [1, 3], 2: [2, 7]}),
    "empty": ((3, 4, 5), 1, [2, 1, 4], {0: [0, 3], 2: [0, 1, 4, 0]}),
    "empty batch": ((3, 4, 5), 1, [3, 1, 1], {0: [0, 3, 0]}),
    "more workers than features": ((3, 4, 2), 1, [2, 1, 4], None),
}


def both(kind: str, P_x: CartesianPartition, shape: Sequence[int], **options: Any) -> Made:
    axes = range(P_x.dim - len(shape), P_x.dim)
    return make_both(
        lambda: getattr(torch.nn, kind)(shape, dtype=F64, **options),
        lambda: getattr(nn, f"Distributed{kind}")(P_x, shape, dtype=F64, **options),
        owner(P_x, axes),
    )


@pytest.mark.parametrize("of", ["input", "parameters"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("case", ["batch", "mixed", "uneven", "empty", "empty batch"])
@distributed(ranks=9, transports=["loopback"])
def test_double_backward(P_world: Partition, case: str, kind: str, of: str) -> None:
    shape, count, P, sizes = CASES[case]
    P_x, owned_axes = grid(P_world, P), range(-count, 0)
    made = both(kind, P_x, shape[-count:])
    check_penalty(made, P_x, shape, owner(P_x, owned_axes), of, sizes)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@distributed(ranks=4, transports=["loopback"])
def test_messages(P_world: Partition, kind: str) -> None:
    """One group forward and one backward where features are split; of parameters, if not."""
    for P, here, affine, expected in (
        ([1, 4], (3, 2), True, 1),
        ([2, 2], (3, 4), True, 1),
        ([4, 1], (3, 8), True, 1),
        ([4, 1], (3, 8), False, 0),
    ):
        P_x = grid(P_world, P)
        whole = [n * p for n, p in zip(here, P, strict=True)]
        layer = getattr(nn, f"Distributed{kind}")(
            P_x, 8, elementwise_affine=affine, global_shape=whole
        )
        assert_groups(P_world, layer, here, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@distributed(ranks=4, transports=["loopback"])
def test_other_dtypes(P_world: Partition, kind: str, dtype: torch.dtype) -> None:
    """The error to float64 is as small as that of torch's layer, which rounds its output."""
    P_x, shape = grid(P_world, [1, 4]), (3, 600)
    whole = (random_like_all(shape, 1) + 10).to(dtype)
    expected = getattr(torch.nn, kind)(600, eps=1e-5, dtype=F64)(whole.double())
    y = getattr(nn, f"Distributed{kind}")(P_x, 600, eps=1e-5, dtype=dtype)(own_block(whole, P_x))
    assert y.dtype == dtype
    tolerance = 2 * torch.finfo(dtype).eps
    assert_block_of(y.double(), expected, own_slices(shape, P_x), "output", tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@distributed(ranks=2, transports=["loopback"])
def test_default_epsilon_of_rms_norm(P_world: Partition, dtype: torch.dtype) -> None:
    """Torch's depends on the dtype; seen where values are small."""
    P_x, shape = grid(P_world, [1, 2]), (2, 8)
    whole = (random_like_all(shape, 1) * 1e-4).to(dtype)
    expected = torch.nn.RMSNorm(8, dtype=dtype)(whole)
    y = nn.DistributedRMSNorm(P_x, 8, dtype=dtype)(own_block(whole, P_x))
    tolerance = 4 * torch.finfo(dtype).eps
    assert_block_of(y, expected, own_slices(shape, P_x), "output", tolerance)


@distributed(ranks=4, transports=["loopback"])
def test_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 2])
    for make in (nn.DistributedLayerNorm, nn.DistributedRMSNorm):
        with pytest.raises(PartitionError, match=r"normalized_shape \[2, 3, 4\] has 3 dims"):
            make(P_x, [2, 3, 4])
        with pytest.raises(PartitionError, match=r"normalized_shape \[\] has 0 dims"):
            make(P_x, [])
        with pytest.raises(ShapeError, match=r"\[4, 6\] does not end in .* \[5\]"):
            make(P_x, 5)(torch.randn(2, 3))
        with pytest.raises(ShapeError, match="has 3 dims, not 2"):
            make(P_x, 6)(torch.randn(1, 2, 3))
