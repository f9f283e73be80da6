"""Tensors are converted to another dtype only if their values survive, at most rounded."""

from __future__ import annotations

import cmath
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from gpudist import checkpoint
from gpudist.checkpoint.conversion import convert_dtype, dtype_problem
from gpudist.errors import CheckpointError
from tests.checkpoint.one_rank import P_WORLD, Extra, Holder, Keeper

INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
FLOATS = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)


def values_of(dtype: torch.dtype) -> list[Any]:
    if dtype == torch.bool:
        return [True, False]
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        near = [limits.min, limits.max, limits.max - 1, limits.max // 2 + 1, 2**24 + 1, -1, 0, 1, 3]
        return [value for value in near if limits.min <= value <= limits.max]
    about = torch.finfo(dtype)
    numbers = [0.0, -1.0, 1.75, about.max, about.min, float("nan"), 2.0**15, 448.0]
    return [complex(x, 1) for x in numbers] if dtype.is_complex else numbers


def fits(value: Any, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` holds an integer exactly, or a number within its range."""
    if dtype == torch.bool:
        return value in (0, 1)
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return limits.min <= value <= limits.max
    if isinstance(value, (bool, int)):
        one = torch.tensor(0, dtype=dtype.to_real() if dtype.is_complex else dtype)
        digits = torch.finfo(one.dtype).eps.as_integer_ratio()[1].bit_length()
        odd = abs(value) // (value & -value) if value else 0
        return odd.bit_length() <= digits and abs(value) <= torch.finfo(one.dtype).max
    parts = [abs(part) for part in (complex(value).real, complex(value).imag)]
    # Half a unit in the last place above the largest number is rounded to it.
    return all(part != part or part <= torch.finfo(dtype).max for part in parts)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_every_value_into_every_dtype(stored: torch.dtype) -> None:
    order = {**dict.fromkeys((torch.bool, *INTEGERS), 1), **dict.fromkeys(FLOATS, 2)}
    for value in values_of(stored):
        x = torch.tensor(value, dtype=torch.float64 if stored in FLOATS else stored).to(stored)
        for wanted in DTYPES:
            is_of_a_kind = order.get(stored, 3) <= order.get(wanted, 3)
            assert bool(dtype_problem(stored, wanted)) is not is_of_a_kind, wanted
            if not is_of_a_kind or not fits(x.item(), wanted):
                with pytest.raises(CheckpointError, match=r"x has .*; use"):
                    convert_dtype(x, wanted, "x")
                continue
            y = convert_dtype(x, wanted, "x")
            assert y.dtype == wanted
            if order.get(stored, 3) == 1:
                assert y.item() == value, wanted
            elif cmath.isfinite(value):
                assert abs(y.item() - x.item()) <= 0.07 * abs(x.item()), wanted
            else:
                assert not cmath.isfinite(y.item()), wanted


LOADS: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {
    "complex": (torch.tensor([1 + 2j]), torch.zeros(1), "complex64.* does not convert to .*32"),
    "fraction": (torch.tensor([1.7]), torch.zeros(1, dtype=torch.int64), "use the same dtype"),
    "large": (torch.tensor([1, 300]), torch.zeros(2, dtype=torch.int8), "contains 300, which"),
    "huge": (torch.tensor([1e300]).double() * 1e300, torch.zeros(1), ""),
    "range": (torch.tensor([1e300], dtype=torch.float64), torch.zeros(1), r"contains 1e\+300"),
    "flag": (torch.tensor([2]), torch.zeros(1, dtype=torch.bool), "contains 2, which torch.bool"),
    "wider": (torch.tensor([1.5]), torch.zeros(1, dtype=torch.float64), ""),
    "rounded": (torch.tensor([1 + 2**-20]), torch.zeros(1, dtype=torch.bfloat16), ""),
    "flag to number": (torch.tensor([True]), torch.zeros(1, dtype=torch.int32), ""),
    "real to complex": (torch.tensor([1.5]), torch.zeros(1, dtype=torch.complex64), ""),
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("dcp", "sequential", "optimizer"):
        monkeypatch.setattr(f"gpudist.checkpoint.{room}.world_of", lambda module: P_WORLD)


@pytest.mark.parametrize("way", ["file", "full dict"])
@pytest.mark.parametrize("case", list(LOADS))
def test_load_converts_or_refuses(tmp_path: Path, case: str, way: str) -> None:
    stored, wanted, words = LOADS[case]
    source, target = Holder(x=stored), Holder(x=wanted.clone())
    x: Any = target.x
    with torch.no_grad():
        target.weight.zero_()

    def load() -> None:
        if way == "file":
            checkpoint.load(target, tmp_path / "a")
        else:
            checkpoint.load_full_state_dict(target, checkpoint.full_state_dict(source))

    checkpoint.save(source, tmp_path / "a")
    if not words:
        load()
        assert torch.equal(x, stored.to(wanted.dtype))
        return
    with pytest.raises(CheckpointError, match=f"x .*{words}"):
        load()
    assert torch.equal(x, wanted)
    # Kinds of numbers are compared before anything changes, for a full dict all values.
    if way != "file" or "contains" not in words:
        assert not target.weight.any()


def test_state_beyond_the_range_of_another_parameter(tmp_path: Path) -> None:
    """State is converted with its parameter, which another model may keep in another dtype."""
    source, target = Extra({}), Extra({}).half()
    state = {"m": torch.full((2, 3), 1e6), "n": torch.full((2, 3), 0.1)}
    checkpoint.save(source, tmp_path / "a", Keeper(source, state))
    other = Keeper(target, {"m": torch.ones(2, 3).half()})
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r"m of .* contains 1000000.0, which torch.float16"):
        checkpoint.load(target, tmp_path / "a", other)
    assert torch.equal(other.state_dict()["state"][0]["m"], before["state"][0]["m"])
    checkpoint.save(source, tmp_path / "a", Keeper(source, {"n": state["n"]}))
    checkpoint.load(target, tmp_path / "a", other)
    assert torch.equal(other.state[target.weight]["n"], state["n"].half())
