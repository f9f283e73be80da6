"""A spectrum: a global tensor whose split dims wait to be transformed.

Fourier transforms, their shifts, and zeros around a slice work on each dim by itself. So these
steps can wait, dim by dim, until it is known which cells of the other dims are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpudist.geometry.layout import NdSbp
from gpudist.sbp import views
from gpudist.sbp.global_spec import global_spec, make_wrapper
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.methods import METADATA
from gpudist.sbp.placement import Placement
from gpudist.sbp.spectral_layouts import split_dims, split_dims_of, without
from gpudist.sbp.trees import tensors_in

T = torch.Tensor
Ranges = tuple[range, ...]
# A function of a tensor and some dims, and the dims along which it has not been applied yet.
Step = tuple[Callable[[Any, Collection[int]], Any], frozenset[int]]
# Functions that do not need the cells of their first tensor, unless they return ``NotImplemented``.
STEPS: dict[Any, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Pending:
    """How to compute a spectrum.

    Attributes:
        home: attributes of the network's inputs, which later functions most likely need.
        base: tensor that the steps change, which nobody else writes to; ``None`` for zeros.
        steps: functions to apply in order, each along its own dims, which must be whole.
        along: dims that have been transformed.
        zeros: placement and attributes of the value if it is zero everywhere.
        around: cells that modes were assigned to, by dim, with zeros around them later; ``None`` if
            nothing can be assigned.
        parts: slices that have been taken, by the cells along the dims that are whole.
    """

    home: NdSbp
    base: GlobalTensor | None
    steps: tuple[Step, ...] = ()
    along: frozenset[int] = frozenset()
    zeros: tuple[Placement, NdSbp] | None = None
    around: dict[int, range] | None = None
    parts: dict[Ranges, GlobalTensor] = field(default_factory=dict[Ranges, GlobalTensor])

    @property
    def late(self) -> frozenset[int]:
        """Dims with steps."""
        return frozenset().union(*(dims for _, dims in self.steps))

    @property
    def blocked(self) -> frozenset[int]:
        """Dims with steps that must wait, because they are split."""
        return self.late & split_dims_of(self.base)

    @property
    def layout(self) -> tuple[Placement, NdSbp]:
        """Placement and attributes of the value."""
        if self.base is None:
            assert self.zeros is not None
            return self.zeros
        return self.base.placement, without(self.base, self.blocked, self.along, self.home)

    def after_steps(self, dims: Collection[int]) -> Pending:
        """Return what is left after the steps along some dims."""
        due = self.late & {*dims}
        steps = tuple((step, along - due) for step, along in self.steps if along - due)
        return replace(self, base=self.after(self.base, due), steps=steps)

    def after(self, x: Any, dims: Collection[int]) -> Any:
        """Return ``x`` after the steps along some dims."""
        for step, along in self.steps:
            due = along & {*dims}
            x = step(x, due) if due else x
        return x

    def box_to(self, sbp: NdSbp) -> GlobalTensor:
        """Return the value with attributes ``sbp``, which split none of the dims ``blocked``.

        Steps along dims that it splits are taken before the tensor moves, all others after.
        """
        first = self.after_steps(split_dims(sbp))
        assert first.base is not None
        return first.after(first.base.to_global(sbp=sbp), first.late)


class Spectrum(GlobalTensor):
    """A global tensor that is computed when its cells are needed.

    Then it becomes an ordinary global tensor. Shape, dtype and layout are known before.

    Attributes:
        _pending: how to compute it.
        _changed: cells of the part that has changed in place since.
    """

    _pending: Pending
    _changed: Ranges | None = None
    # The wrapper's own, from which the spec is made.
    shape, dim, size = torch.Tensor.shape, torch.Tensor.dim, torch.Tensor.size  # pyright: ignore

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        step = STEPS.get(func)
        if step is not None and args and isinstance(args[0], Spectrum):
            result = step(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func not in METADATA:
            for x in tensors_in([args, kwargs]):
                compute_spectrum(x)
        return GlobalTensor.__torch_function__(func, types, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_local":
            return vars(compute_spectrum(self))["_local"]
        if name == "_global_spec":
            placement, sbp = self._pending.layout
            return global_spec(placement, sbp, tuple(self.shape), self.dtype)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def new_spectrum(pending: Pending, shape: Sequence[int], dtype: Any, device: Any) -> Spectrum:
    spectrum = make_wrapper(Spectrum, tuple(shape), dtype=dtype, device=device)
    spectrum._pending = pending
    return spectrum


def compute_spectrum(x: Any) -> Any:
    """Return ``x``, which has cells then. Collective if it had none."""
    if type(x) is not Spectrum:
        if isinstance(x, GlobalTensor) and views.is_outdated(x):
            views.renew(x)
        return x
    pending, base = x._pending, x._pending.base
    placement, sbp = pending.layout
    y: Any
    if base is None:
        y = _zeros_in_place_of(x, placement, sbp)
    else:
        with views.as_made(base):
            y = pending.box_to(sbp)
            # Other spectra read the base.
            y = y.clone() if y._local is base._local else y
    del x._pending
    changed = vars(x).pop("_changed", None)
    x._local, x._global_spec = y._local, y._global_spec
    x.__class__ = GlobalTensor  # pyright: ignore
    for ranges, part in pending.parts.items():
        _link(part, x, ranges)
    if changed is not None:
        part = pending.parts[changed]
        with views.as_made(part):
            x[tuple(map(slice_of, changed))] = part
    return x


def note_change(x: Spectrum, ranges: Ranges) -> None:
    """Note that the part with cells ``ranges`` has changed in place, and outdate all others."""
    x._changed = ranges
    for other, part in x._pending.parts.items():
        if other != ranges:
            views.outdate(part)


def _zeros_in_place_of(x: T, placement: Placement, sbp: NdSbp) -> GlobalTensor:
    shape, index = tuple(x.shape), placement.index
    local_shape = (0,) if index is None else placement.layout(sbp, shape).box(index).shape
    # Not ``torch.zeros``, which a converted network intercepts.
    local = torch.empty(local_shape, dtype=x.dtype, device=x.device).zero_()
    return GlobalTensor._wrap(local, placement, sbp, shape)


def _link(part: GlobalTensor, x: GlobalTensor, ranges: Ranges) -> None:
    """Keep ``part``, a slice of ``x`` with memory of its own, equal to ``x``."""
    index = tuple(map(slice_of, ranges))
    sbp = part.sbp

    def make(whole: Any) -> T:
        return whole[index].to_global(sbp=sbp)

    def write(whole: T, changed: T) -> None:
        whole[index] = changed

    views.link(part, views.EmulatedView(x, make, write, True))


def slice_of(cells: range) -> slice:
    return slice(cells.start, cells.stop, cells.step)


def bypass(x: Spectrum) -> None:
    # Gradients pass it by; see ``methods.require_own_graph``.
    vars(x)["_is_bypassed"] = True
