"""One random configuration of a layer, in plain numbers."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Absolute and relative. With few digits, the order of the sums over ranks shows.
TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 0.25}
_observed = threading.local()


@dataclass(frozen=True)
class Case:
    """Layer with arguments and input: all that is needed to reproduce a failure.

    Args:
        layer: its name without "Distributed", such as ``Conv2d``.
        grid: the shape of the partition of the input, in ranks; its product is at most the world.
        shape: the global shape of the input, in cells.
        options: the layer's keyword arguments, torch's names.
        sizes: uneven blocks of the input, in cells, for each dim that has them.
        dtype: of the input and of the parameters, by torch's name.
        seed: of the initial parameters and of the input.
        extra: whatever else the family needs, such as the grids of the output and the weight.
    """

    layer: str
    grid: tuple[int, ...]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    dtype: str = "float64"
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def to_json(case: Case, **more: Any) -> str:
    """``case`` in one line, without the fields that have their default, and ``more`` fields."""
    default = Case(case.layer, case.grid, case.shape)
    own = {
        name: value
        for name, value in asdict(case).items()
        if name in ("layer", "grid", "shape") or value != getattr(default, name)
    }
    return json.dumps({**own, **more})


def from_json(text: str) -> tuple[Case, dict[str, Any]]:
    """The case that `to_json` wrote, and the other fields. Every list becomes a tuple."""
    given = {name: _with_tuples(value) for name, value in json.loads(text).items()}
    own = {each.name: given.pop(each.name) for each in fields(Case) if each.name in given}
    sizes = {int(dim): blocks for dim, blocks in own.get("sizes", {}).items()}
    return Case(**{**own, "sizes": sizes}), given


def torch_refuses(sequential: Callable[[], Any]) -> bool:
    """Whether torch itself raises in ``sequential``: building the sequential layer and calling it.

    Every such answer is remembered for `observed_refusal_of_torch`, so that the configuration is
    drawn again instead of counted.
    """
    try:
        sequential()
    except Exception as error:
        _observed.refusal = f"{type(error).__name__}: {error}"
        return True
    return False


def require_a_right_kernel(case: Case, extent: int) -> None:
    """Raise where torch's own kernel may be wrong: in bfloat16, with a stride and a single cell.

    See https://github.com/pytorch/pytorch/issues/169688; there is nothing to compare with.
    """
    stride = case.options.get("stride", 1)
    stride = stride if isinstance(stride, int) else stride[-1]
    if case.dtype == "bfloat16" and stride > 1 and extent == 1:
        raise RuntimeError("torch may convolve wrongly")


def observed_refusal_of_torch() -> str | None:
    """Return what `torch_refuses` saw on this rank since the last call, or None."""
    refusal = getattr(_observed, "refusal", None)
    _observed.refusal = None
    return refusal


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_with_tuples(each) for each in value)
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return value
