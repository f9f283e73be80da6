"""In converted networks, transform split dims after the kept modes have moved.

Fourier transforms, their shifts, slices and zeros around a slice work on each dim by itself. So a
transform works at once on the dims that are whole, and postpones the split ones. Its result is a
:class:`Spectrum`. If a slice of it is taken, only the cells of that slice move to make the split
dims whole. The way back is the reverse: a slice of zeros that receives modes stays in their
layout, and the inverse transform works first on the dims that are to be split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F

from gpudist.cache import cache_of
from gpudist.geometry.layout import Layout, NdSbp, Sbp, broadcast, misfit, partial_sum, split
from gpudist.sbp import views
from gpudist.sbp.boxing import boxed_bytes
from gpudist.sbp.call_cache import recalled
from gpudist.sbp.global_spec import global_spec
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.methods import METADATA, entry
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import tensors_in
from gpudist.sbp.scope import Scope, current_scope
from gpudist.sbp.signatures.slicing import index_by_dim

T = torch.Tensor
Ranges = tuple[range, ...]
# Works along those of its dims that it is given, and leaves the others.
Step = Callable[[Any, Collection[int]], Any]
_make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore


@dataclass(frozen=True)
class Pending:
    """How to compute a spectrum.

    Attributes:
        home: attributes of the network's inputs, which later functions most likely need.
        base: tensor that the steps change, which nobody else writes to; ``None`` for zeros.
        steps: functions to apply along the dims ``late``, each of which must be whole.
        late: dims with steps.
        along: dims that have been transformed.
        zeros: placement and attributes of the value if it is zero everywhere.
        around: cells that modes were assigned to, by dim, with zeros around them later; ``None`` if
            nothing can be assigned.
        parts: slices that have been taken, by the cells along the dims that are whole.
    """

    home: NdSbp
    base: GlobalTensor | None
    steps: tuple[Step, ...] = ()
    late: frozenset[int] = frozenset()
    along: frozenset[int] = frozenset()
    zeros: tuple[Placement, NdSbp] | None = None
    around: dict[int, range] | None = None
    parts: dict[Ranges, GlobalTensor] = field(default_factory=dict[Ranges, GlobalTensor])

    @property
    def blocked(self) -> frozenset[int]:
        """Dims with steps that must wait, because they are split."""
        return self.late & _dims(self.base)

    @property
    def layout(self) -> tuple[Placement, NdSbp]:
        """Placement and attributes of the value."""
        if self.base is None:
            assert self.zeros is not None
            return self.zeros
        return self.base.placement, _without(self.base, self.blocked, self.along, self.home)

    def taken(self, dims: Collection[int]) -> Pending:
        """Return what is left after the steps along some dims."""
        own = self.late & {*dims}
        return replace(self, base=self.after(self.base, own), late=self.late - own)

    def after(self, x: Any, dims: Collection[int]) -> Any:
        """Return ``x`` after the steps along some dims."""
        for step in self.steps if dims else ():
            x = step(x, dims)
        return x

    def boxed(self, sbp: NdSbp) -> GlobalTensor:
        """Return the value with attributes ``sbp``, which split none of the dims ``blocked``.

        Steps along dims that it splits are taken before the tensor moves, all others after.
        """
        first = self.taken(_split(sbp))
        assert first.base is not None
        return first.after(first.base.to_global(sbp=sbp), first.late)


class Spectrum(GlobalTensor):
    """A global tensor that is computed when its cells are needed.

    Then it becomes an ordinary global tensor. Shape, dtype and layout are known before.
    """

    _pending: Pending

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        step = _STEPS.get(func)
        if step is not None and args and isinstance(args[0], Spectrum):
            found = step(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func not in METADATA:
            for x in tensors_in([args, kwargs]):
                computed(x)
        return GlobalTensor.__torch_function__(func, types, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_local":
            return vars(computed(self))["_local"]
        if name == "_global_spec":
            placement, sbp = self._pending.layout
            return global_spec(placement, sbp, tuple(self.shape), self.dtype)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _spectrum(pending: Pending, shape: Sequence[int], dtype: Any, device: Any) -> Spectrum:
    made = _make(Spectrum, tuple(shape), dtype=dtype, device=device)
    made._pending = pending
    return made


@contextmanager
def _as_made(base: GlobalTensor) -> Iterator[None]:
    """Compute in the modes that the base was made in, whatever the modes are now."""
    local = base._local
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled() and not local.is_inference():
            modes.enter_context(torch.inference_mode(False))
        if local.requires_grad and not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        yield


def computed(x: Any) -> Any:
    """Return ``x``, which is no longer a spectrum. Collective if it was one."""
    if type(x) is not Spectrum:
        return x
    pending, base = x._pending, x._pending.base
    placement, sbp = pending.layout
    if base is None:
        y = _zeros_in_place_of(x, placement, sbp)
    else:
        with _as_made(base):
            y = pending.boxed(sbp)
    del x._pending
    x._local, x._global_spec = y._local, y._global_spec
    x.__class__ = GlobalTensor  # pyright: ignore
    for ranges, part in pending.parts.items():
        _link(part, x, ranges)
    return x


def _zeros_in_place_of(x: T, placement: Placement, sbp: NdSbp) -> GlobalTensor:
    shape, index = tuple(x.shape), placement.index
    own = (0,) if index is None else placement.layout(sbp, shape).box(index).shape
    # Not ``torch.zeros``, which a converted network intercepts.
    local = torch.empty(own, dtype=x.dtype, device=x.device).zero_()
    return GlobalTensor._wrap(local, placement, sbp, shape)


def _link(part: GlobalTensor, x: GlobalTensor, ranges: Ranges) -> None:
    """Keep ``part``, a slice of ``x`` with memory of its own, equal to ``x``."""
    index = tuple(map(_slice, ranges))
    whole: Any = x
    sbp = part.sbp

    def make() -> T:
        return whole[index].to_global(sbp=sbp)

    def write(changed: T) -> None:
        whole[index] = changed

    views.link(part, views.EmulatedView(x, make, write, True))


def _slice(cells: range) -> slice:
    return slice(cells.start, cells.stop, cells.step)


# --- Layouts -------------------------------------------------------------------------------------


def home_of(x: GlobalTensor) -> NdSbp | None:
    """Return the attributes of the network's inputs, if ``x`` can have them."""
    scope = current_scope()
    if scope is None or x.dim() != scope.dims or not scope.home:
        return None
    return tuple(map(split, scope.home)) if x.placement == scope.placement else None


def _split(sbp: NdSbp) -> set[int]:
    return {one.dim for one in sbp if one.is_split}


def _dims(x: GlobalTensor | None) -> set[int]:
    return set() if x is None else _split(x.sbp)


def _choice(x: GlobalTensor, key: object, make: Callable[[], Any]) -> Any:
    remembered: Any = x.placement.partition.wire.remembered
    return cache_of(remembered, "spectra", 1024).made((x._global_spec, key), make)


def _without(
    x: GlobalTensor, whole: frozenset[int], along: frozenset[int], home: NdSbp | None = None
) -> NdSbp:
    """Return attributes of ``x`` that split none of the dims ``whole`` and have no terms.

    Prefer the attributes of ``home``; then those that leave no worker without cells; then
    transformed dims and the batch, since to split channels leaves terms to sum; then those that
    move the fewest bytes.
    """

    def choose() -> NdSbp:
        others = [split(d) for d in range(x.dim()) if d not in whole] or [broadcast]
        options: list[list[Sbp]] = []
        for axis, one in enumerate(x.sbp):
            if one != partial_sum and one.dim not in whole:
                options.append([one])
            elif home is not None and home[axis].dim not in whole:
                options.append([home[axis]])
            else:
                options.append(others)

        def price(sbp: NdSbp) -> tuple[int, ...]:
            layout = x.global_layout.with_sbp(sbp)
            cells = [box.volume for box in layout.boxes.values()]
            channels = sum(one.dim > 0 and one.dim not in along for one in sbp)
            moved = boxed_bytes(x.global_layout, layout, x.dtype)
            return cells.count(0), channels, moved, max(cells)

        return min(_fitting(options, x, tuple(x.shape)), key=price)

    return _choice(x, (whole, along, home), choose)


def _fitting(options: Sequence[list[Sbp]], x: GlobalTensor, shape: tuple[int, ...]) -> list[NdSbp]:
    # Explicit sizes of blocks fit only some.
    found = [sbp for sbp in product(*options) if not misfit(sbp, x.placement.shape, shape)]
    return found or [(broadcast,) * len(options)]


class _WayBack(NamedTuple):
    """An inverse transform.

    Attributes:
        late: dims to transform, or to take steps along.
        shape: shape of the result.
        last: dim that becomes real, after all others are transformed; -1 if there is none.
        home: attributes of the network's inputs.
    """

    late: frozenset[int]
    shape: tuple[int, ...]
    last: int
    home: NdSbp

    def end(self, x: GlobalTensor) -> NdSbp:
        """Return the attributes of the result for modes ``x``.

        Dims that they split are transformed before the tensor moves. They leave no worker without
        cells, and move the fewest bytes, counting those from the result to ``home``.
        """

        def choose() -> NdSbp:
            return min(_fitting(self._options(x), x, self.shape), key=self._price(x))

        return _choice(x, self, choose)

    def _options(self, x: GlobalTensor) -> list[list[Sbp]]:
        whole = (self.late & _dims(x)) | {self.last}
        splits = [split(d) for d in range(x.dim()) if d not in whole]
        found: list[list[Sbp]] = []
        for own, home in zip(x.sbp, self.home, strict=True):
            others = [*splits, broadcast] if home.dim in whole else [home]
            kept = [] if own.is_split and own.dim in whole else [own]
            found.append([*kept, *others] if own.is_split else [*others, *kept])
        return found

    def _price(self, x: GlobalTensor) -> Callable[[NdSbp], tuple[int, int]]:
        given = x.global_layout

        def price(sbp: NdSbp) -> tuple[int, int]:
            early = self.late & _split(sbp)
            moved = [self.shape[d] if d in early else n for d, n in enumerate(x.shape)]
            source = Layout(given.ranks, given.grid, x.sbp, tuple(moved))
            result = Layout(given.ranks, given.grid, sbp, self.shape)
            idle = sum(not box.volume for box in result.boxes.values())
            left = boxed_bytes(result, result.with_sbp(self.home), x.dtype)
            left = left if self.last < 0 else left // 2
            return idle, boxed_bytes(source, source.with_sbp(sbp), x.dtype) + left

        return price


# --- Transforms ----------------------------------------------------------------------------------


class _Transform(NamedTuple):
    """Arguments of a transform: cells of each transformed dim, in order, and the norm."""

    extents: dict[int, int]
    norm: str | None

    def over(self, function: Any, x: Any, dims: Collection[int]) -> Any:
        """Apply ``function`` over some of the dims, which are whole, by its rule."""
        own = [d for d in self.extents if d in dims]
        sizes = [self.extents[d] for d in own]
        return recalled(GlobalTensor, function, (x, sizes, own, self.norm), {}) if own else x


def _read(name: str, x: T, s: Any = None, dim: Any = None, norm: Any = None, **more: Any) -> Any:
    """Return the arguments of ``torch.fft``'s function ``name``; ``None`` if it is to say why not.

    In the transforms between real and complex numbers, the last extent is that of the real tensor.
    """
    s = more.pop("n", s)
    if more.pop("out", None) is not None or more or norm not in (None, *_NORMS):
        return None
    if dim is None and name.endswith("2"):
        dim = (-2, -1)
    if dim is None and not name.endswith("n"):
        dim = -1
    s, dim = ([one] if hasattr(one, "__index__") else one for one in (s, dim))
    if dim is None:
        dim = range(x.dim()) if s is None else range(-len(s), 0)
    dims = [d % x.dim() for d in dim if -x.dim() <= d < x.dim()]
    if len({*dims}) != len(dim) or not dims or (s is not None and len(s) != len(dims)):
        return None
    sizes = [x.shape[d] for d in dims]
    if name.startswith("irfft"):
        sizes[-1] = 2 * (sizes[-1] - 1)
    if s is not None:
        sizes = [n if own == -1 else own for n, own in zip(sizes, s, strict=True)]
    return _Transform(dict(zip(dims, sizes, strict=True)), norm) if min(sizes) > 0 else None


_NORMS = ("backward", "ortho", "forward")


def _transform(name: str, x: GlobalTensor, *args: Any, **kwargs: Any) -> Any:
    """Transform a spectrum, or a tensor with split dims; ``NotImplemented`` leaves it to the rule.

    A transform returns a spectrum. That of real numbers works at once on its last dim, which it
    makes whole; that of complex numbers on all that are whole. An inverse transform returns an
    ordinary tensor.
    """
    if torch._C._are_functorch_transforms_active():  # pyright: ignore
        return NotImplemented
    pending = vars(x).get("_pending")
    base: Any = x if pending is None else pending.base
    home = None if base is None else home_of(x)
    if base is None or home is None or base.is_copy_everywhere:
        return NotImplemented
    given: _Transform | None = _read(name, x, *args, **kwargs)
    if given is None:
        return NotImplemented
    pending = pending or Pending(home, x)
    if name.startswith("i"):
        is_real = name.startswith("irfft")
        return _inverse(x, pending, given, is_real) if x.is_complex() else NotImplemented
    *_, last = given.extents
    is_real = name.startswith("rfft")
    if is_real == x.is_complex() or x.dtype == torch.complex32:
        return NotImplemented
    cut = _dims(base) & {*given.extents}
    if is_real and last in cut and len(cut) > 1:
        sbp = _without(base, frozenset({last}), frozenset(given.extents))
        pending = replace(pending, base=base.to_global(sbp=sbp))
        cut = _split(sbp) & {*given.extents}
    now = {last} - cut if is_real else {*given.extents} - cut
    if not cut or (is_real and not now) or not (now or isinstance(x, Spectrum)):
        return NotImplemented
    later = {*given.extents} - now
    less = pending.taken(now)
    base = given.over(torch.fft.rfftn if is_real else torch.fft.fftn, less.base, now)
    shape = [base.shape[d] if d in now else given.extents.get(d, n) for d, n in enumerate(x.shape)]
    less = replace(
        less,
        base=base,
        steps=(*less.steps, lambda t, dims: given.over(torch.fft.fftn, t, later & {*dims})),
        late=less.late | later,
        along=less.along | {*given.extents},
    )
    return _derived(x, less, shape)


def _derived(x: GlobalTensor, pending: Pending, shape: Sequence[int]) -> Spectrum:
    """Return a spectrum whose gradient does not pass through ``x``, if that is one."""
    base = pending.base
    assert base is not None
    if base._local.requires_grad and not torch.is_grad_enabled():
        base = base.detach()
    if isinstance(x, Spectrum):
        _bypass(x)
    pending = replace(pending, base=base, around=None, parts={})
    return _spectrum(pending, shape, base.dtype, base.device)


def _bypass(x: Spectrum) -> None:
    # Gradients pass it by; see ``methods.require_own_graph``.
    vars(x)["_is_bypassed"] = True


def _inverse(x: GlobalTensor, pending: Pending, given: _Transform, is_real: bool) -> Any:
    base, dims = pending.base, [*given.extents]
    assert base is not None
    shape = tuple([given.extents.get(d, n) for d, n in enumerate(x.shape)])
    last = dims[-1] if is_real else -1
    late = pending.late | {*dims} - {last}
    sbp = _WayBack(late, shape, last, pending.home).end(base)
    if sbp == base.sbp and not pending.late:
        return NotImplemented
    if isinstance(x, Spectrum):
        _bypass(x)
    early = [d for d in dims if d in _split(sbp)]
    first = pending.taken(_split(sbp))
    y = given.over(torch.fft.ifftn, first.base, early).to_global(sbp=sbp)
    # Zeros along the last dim come last, so that no transform works on them.
    y = first.after(y, first.late - {dims[-1]})
    y = given.over(torch.fft.ifftn, y, {*dims[:-1]} - {*early})
    y = first.after(y, first.late & {dims[-1]})
    return given.over(torch.fft.irfftn if is_real else torch.fft.ifftn, y, {dims[-1]} - {*early})


def _shift(function: Any, x: Spectrum, dim: Any = None) -> Any:
    pending = x._pending
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = [d % x.dim() for d in dims]
    if pending.base is None or not dims:
        return NotImplemented

    def shift(t: Any, along: Collection[int]) -> Any:
        own = [d for d in dims if d in along]
        return function(t, own) if own else t

    base = shift(pending.base, {*range(x.dim())} - pending.late)
    return _derived(x, replace(pending, base=base, steps=(*pending.steps, shift)), tuple(x.shape))


# --- Slices --------------------------------------------------------------------------------------


def _ranges(x: T, index: Any) -> Ranges | None:
    """Return the cells of each dim that ``x[index]`` takes, if these are slices with cells."""
    try:
        by_dim = index_by_dim(index, x.dim())
    except NotImplementedError:
        return None
    if len(by_dim) != x.dim() or not all(isinstance(one, slice) for one in by_dim):
        return None
    found = tuple(range(*one.indices(n)) for one, n in zip(by_dim, x.shape, strict=True))
    return found if all(found) else None


def _take(x: Spectrum, index: Any) -> Any:
    """Compute a slice of a spectrum: first the cells that it takes of whole dims.

    Slices that take the same of these share one computation.
    """
    pending, ranges = x._pending, _ranges(x, index)
    if not pending.late or pending.around is not None or ranges is None:
        return NotImplemented
    blocked = pending.blocked
    own = tuple(range(n) if d in blocked else ranges[d] for d, n in enumerate(x.shape))
    if own == tuple(map(range, x.shape)):
        return NotImplemented
    _bypass(x)
    part = pending.parts.get(own)
    if part is None:
        part = pending.parts[own] = _part(x, own)
    rest = [_slice(r) if d in blocked else slice(None) for d, r in enumerate(ranges)]
    return part[tuple(rest)]


def _part(x: Spectrum, own: Ranges) -> GlobalTensor:
    """Compute the cells ``own``, which include all along the split dims with steps."""
    pending = x._pending
    base, blocked = pending.base, pending.blocked
    assert base is not None
    cells = [*map(_slice, own)]
    with _as_made(base):
        first = [slice(None) if d in pending.late else one for d, one in enumerate(cells)]
        less = replace(pending, base=base[tuple(first)], parts={}).taken(pending.late - blocked)
        then = [slice(None) if d in blocked else one for d, one in enumerate(cells)]
        then = [one if d in pending.late else slice(None) for d, one in enumerate(then)]
        less = replace(less, base=less.base[tuple(then)])  # pyright: ignore
    part = computed(_spectrum(less, tuple(map(len, own)), x.dtype, x.device))
    weak = ref(x)

    def write(changed: T) -> None:
        whole = weak()
        if whole is not None:
            whole[tuple(map(_slice, own))] = changed

    # Once ``x`` has cells, which may change, the part is linked to it.
    views.link(part, views.EmulatedView(base, base.clone, write, True))
    return part


def _assign(x: Spectrum, index: Any, value: Any) -> Any:
    """Write modes to a slice of zeros: the result has the layout of the modes.

    Zeros are added around them later, along each dim when its cells are needed.
    """
    pending, ranges = x._pending, _ranges(x, index)
    if pending.around is None or ranges is None or not isinstance(value, GlobalTensor):
        return NotImplemented
    base = pending.base
    if tuple(map(len, ranges)) != tuple(value.shape):
        return NotImplemented
    if any(one.step != 1 for one in ranges) or value.is_copy_everywhere:
        return NotImplemented
    if value.placement != pending.layout[0]:
        return NotImplemented
    if base is None:
        around = {d: one for d, one in enumerate(ranges) if len(one) < x.shape[d]}
        if partial_sum in value.sbp:
            value = value.to_global(sbp=_without(value, frozenset(), frozenset(around)))
        made = value.to(x.dtype)
        made = made.clone() if made is value else made
    else:
        around = {d: one for d, one in pending.around.items() if one == ranges[d]}
        filled = pending.around.keys() - around.keys()
        is_cut = base._local.requires_grad and not torch.is_grad_enabled()
        if is_cut or filled & _dims(base):
            return NotImplemented
        made = pending.after(base, filled) if filled else base.clone()
        made[tuple([slice(None) if d in around else _slice(r) for d, r in enumerate(ranges)])] = (
            value
        )

    def pad(t: Any, dims: Collection[int]) -> Any:
        widths: list[int] = []
        for d, n in reversed([*enumerate(x_shape)]):
            cells = around[d] if d in around and d in dims else range(n)
            widths += [cells.start, n - cells.stop]
        return F.pad(t, widths) if any(widths) else t

    x_shape = tuple(x.shape)
    x._pending = replace(
        pending, base=made, around=around, late=frozenset(around), steps=(pad,), zeros=None
    )
    return None


# --- Zeros ---------------------------------------------------------------------------------------


def zeros(scope: Scope, *size: Any, **options: Any) -> Spectrum | None:
    """Return complex zeros without cells for ``torch.zeros(*size, **options)``.

    Returns ``None`` if torch is to make them.
    """
    dtype = options.get("dtype")
    if dtype is None or not dtype.is_complex or not {*options} <= {"dtype", "device", "size"}:
        return None
    given = options.get("size", size[0] if len(size) == 1 else size)
    device = torch.empty(0, dtype=dtype, device=options.get("device")).device
    if isinstance(given, int) or device.type not in (scope.placement.type, "meta"):
        return None
    return _zeros(scope, (broadcast,) * scope.placement.axes, given, dtype, device)


def _zeros(
    scope: Scope, sbp: NdSbp, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Spectrum | None:
    if len(shape) != scope.dims or not scope.home:
        return None
    home = tuple(map(split, scope.home))
    pending = Pending(home, None, zeros=(scope.placement, sbp), around={})
    return _spectrum(pending, tuple(map(int, shape)), dtype, device)


def _zeros_like(x: GlobalTensor, **options: Any) -> Any:
    dtype, scope = options.get("dtype") or x.dtype, current_scope()
    if scope is None or not dtype.is_complex or not {*options} <= {"dtype"}:
        return NotImplemented
    if home_of(x) is None:
        return NotImplemented
    found = _zeros(scope, x.sbp, tuple(x.shape), dtype, x.device)
    return NotImplemented if found is None else found


def _new_zeros(x: GlobalTensor, *size: Any, **options: Any) -> Any:
    scope, dtype = current_scope(), options.get("dtype") or x.dtype
    if scope is None:
        return NotImplemented
    found = zeros(scope, *size, **{"device": x.device, **options, "dtype": dtype})
    return NotImplemented if found is None else found


def _text(x: Spectrum, *_: object, **__: object) -> str:
    # A text must not communicate.
    return f"GlobalTensor(shape={list(x.shape)}, dtype={x.dtype}, not computed yet)"


def _requires_grad(x: Spectrum, *_: object) -> bool:
    base = x._pending.base
    return base is not None and base._local.requires_grad


# Functions that do not need the cells of their first tensor, unless they return ``NotImplemented``.
_STEPS: dict[Any, Callable[..., Any]] = {
    T.__getitem__: _take,
    T.__setitem__: _assign,
    T.requires_grad.__get__: _requires_grad,  # pyright: ignore
    **dict.fromkeys((T.__repr__, T.__str__, T.__format__), _text),
    **{one: partial(_shift, one) for one in (torch.fft.fftshift, torch.fft.ifftshift)},
}


def _enter(function: Any, step: Callable[..., Any]) -> None:
    """Register a step that may also work on an ordinary tensor."""
    _STEPS[function] = step

    @entry(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = NotImplemented
        if current_scope() is not None and args and isinstance(args[0], GlobalTensor):
            found = step(*args, **kwargs)
        return recalled(GlobalTensor, function, args, kwargs) if found is NotImplemented else found


_enter(torch.zeros_like, _zeros_like)
_enter(T.new_zeros, _new_zeros)
for _kind in ("fft", "ifft", "rfft", "irfft"):
    for _name in (_kind, f"{_kind}2", f"{_kind}n"):
        _enter(getattr(torch.fft, _name), partial(_transform, _name))
