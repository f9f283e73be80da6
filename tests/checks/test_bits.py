"""Digests of the bits of tensors."""

from __future__ import annotations

import pytest
import torch

from gpudist.checks.bits import bytes_of, digest_unless_constant, digests_of, has_bits

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128,
]  # fmt: skip


def digest(x: torch.Tensor) -> int:
    return digests_of([x])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cells", [1, 3, 8, 70_001])
def test_every_cell_counts(dtype: torch.dtype, cells: int) -> None:
    x = (torch.arange(cells) % 2).to(dtype)
    before = digest(x)
    assert digest(x.clone()) == before
    for cell in {0, cells // 2, cells - 1}:
        other = x.clone()
        other.view(torch.uint8).view(cells, -1)[cell, -1] ^= 1
        assert digest(other) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changes_do_not_cancel(dtype: torch.dtype) -> None:
    x = torch.zeros(64, dtype=dtype)
    signs = x.clone()
    signs[3], signs[9] = -0.0, -0.0
    swapped = torch.arange(64, dtype=dtype)
    order = [1, 0, *range(2, 64)]
    assert len({*digests_of([x, signs])}) == 2
    assert len({*digests_of([swapped, swapped[order], swapped.flip(0)])}) == 3


def test_depends_on_values_and_not_on_strides() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    views = [x.transpose(0, 2), x[:, :, 1:], x[1:].expand(3, 3, 4), torch.tensor(5.0)]
    assert digests_of(views) == digests_of([view.contiguous().clone() for view in views])
    conjugate = torch.view_as_complex(x.view(12, 2)).conj()
    assert digest(conjugate) == digest(conjugate.resolve_conj())


def test_nan_equals_itself() -> None:
    x = torch.tensor([1.0, float("nan")])
    assert digest(x) == digest(x.clone())


def test_empty_tensors() -> None:
    assert digests_of([]) == []
    assert digest(torch.empty(0, 3)) == digest(torch.empty(0))
    assert digest_unless_constant(torch.empty(0)) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants_have_no_digest(dtype: torch.dtype) -> None:
    assert digest_unless_constant(torch.ones(3, 5).to(dtype)) == 0
    assert digest_unless_constant(torch.tensor([7]).to(dtype)) == 0
    x = torch.tensor([[0, 0], [0, 1]]).to(dtype)
    assert digest_unless_constant(x) == digest_unless_constant(x.clone()) != 0
    assert digest_unless_constant(x) != digest_unless_constant(x.flip(0))


def test_tensors_without_bits() -> None:
    assert has_bits(torch.nn.Parameter(torch.ones(2)))
    without = [torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse()]
    assert not any(map(has_bits, without))
    assert [digest_unless_constant(x) for x in without] == [0, 0]
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(has_bits(x)), x)[1])(torch.ones(2, 2))
    assert seen == [False]


def test_bytes_follow_the_order_of_cells() -> None:
    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    assert bytes_of(x.t()).view(torch.int16).tolist() == [1, 3, 2, 4]
