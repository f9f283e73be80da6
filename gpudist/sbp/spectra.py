"""In converted networks, transform split dims after the kept modes have moved.

A transform works at once on its last dim, and returns a spectrum. If a slice of it is taken, only
the cells of that slice move to make the split dims whole. The way back is the reverse: a slice of
zeros that receives modes stays in their layout, and the inverse transform works first on the dims
that are to be split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import NdSbp, broadcast, partial_sum, split
from gpudist.sbp import views
from gpudist.sbp.call_cache import call_cached
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.methods import entry
from gpudist.sbp.scope import Scope, current_scope
from gpudist.sbp.signatures.slicing import index_by_dim
from gpudist.sbp.spectral_layouts import home_of, split_dims, split_dims_of, way_back, without
from gpudist.sbp.spectrum import (
    STEPS,
    Pending,
    Ranges,
    Spectrum,
    bypass,
    compute_spectrum,
    new_spectrum,
    note_change,
    slice_of,
)

T = torch.Tensor

# --- Transforms ----------------------------------------------------------------------------------


class _Transform(NamedTuple):
    """Arguments of a transform: cells of each transformed dim, in order, and the norm."""

    extents: dict[int, int]
    norm: str | None

    def over(self, function: Any, x: Any, dims: Collection[int]) -> Any:
        """Apply ``function`` over some of the dims, which are whole, by its rule."""
        own_dims = [d for d in self.extents if d in dims]
        sizes = [self.extents[d] for d in own_dims]
        return (
            call_cached(GlobalTensor, function, (x, sizes, own_dims, self.norm), {})
            if own_dims
            else x
        )


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
    s, dim = ([argument] if hasattr(argument, "__index__") else argument for argument in (s, dim))
    if dim is None:
        dim = range(x.dim()) if s is None else range(-len(s), 0)
    dims = [d % x.dim() for d in dim if -x.dim() <= d < x.dim()]
    if len({*dims}) != len(dim) or not dims or (s is not None and len(s) != len(dims)):
        return None
    sizes = [x.shape[d] for d in dims]
    if name.startswith("irfft"):
        sizes[-1] = 2 * (sizes[-1] - 1)
    if s is not None:
        sizes = [n if size == -1 else size for n, size in zip(sizes, s, strict=True)]
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
    if vars(x).get("_changed") is not None:
        return NotImplemented
    pending = vars(x).get("_pending")
    base: Any = x if pending is None else pending.base
    home = None if base is None else home_of(x)
    if base is None or home is None or base.is_copy_everywhere:
        return NotImplemented
    transform: _Transform | None = _read(name, x, *args, **kwargs)
    if transform is None:
        return NotImplemented
    pending = pending or Pending(home, x)
    if name.startswith("i"):
        is_real = name.startswith("irfft")
        return _inverse(x, pending, transform, is_real) if x.is_complex() else NotImplemented
    *_, last = transform.extents
    is_real = name.startswith("rfft")
    if is_real == x.is_complex() or x.dtype == torch.complex32:
        return NotImplemented
    cut = split_dims_of(base) & {*transform.extents}
    if is_real and last in cut and len(cut) > 1:
        sbp = without(base, frozenset({last}), frozenset(transform.extents))
        pending = replace(pending, base=base.to_global(sbp=sbp))
        cut = split_dims(sbp) & {*transform.extents}
    now = {last} - cut if is_real else {*transform.extents} - cut
    if not cut or (is_real and not now) or not (now or isinstance(x, Spectrum)):
        return NotImplemented
    later = frozenset(transform.extents) - now
    less = pending.after_steps(now)
    base = transform.over(torch.fft.rfftn if is_real else torch.fft.fftn, less.base, now)
    shape = [
        base.shape[d] if d in now else transform.extents.get(d, n) for d, n in enumerate(x.shape)
    ]
    less = replace(
        less,
        base=base,
        steps=(*less.steps, (partial(transform.over, torch.fft.fftn), later))
        if later
        else less.steps,
        along=less.along | {*transform.extents},
    )
    return _derive_spectrum(x, less, shape)


def _derive_spectrum(x: GlobalTensor, pending: Pending, shape: Sequence[int]) -> Spectrum:
    """Return a spectrum whose gradient does not pass through ``x``, if that is one."""
    base = pending.base
    assert base is not None
    if base._local.requires_grad and not torch.is_grad_enabled():
        base = base.detach()
    if isinstance(x, Spectrum):
        bypass(x)
    pending = replace(pending, base=base, around=None, parts={})
    return new_spectrum(pending, shape, base.dtype, base.device)


def _inverse(x: GlobalTensor, pending: Pending, transform: _Transform, is_real: bool) -> Any:
    base, dims = pending.base, [*transform.extents]
    assert base is not None
    shape = tuple([transform.extents.get(d, n) for d, n in enumerate(x.shape)])
    last = dims[-1] if is_real else -1
    late = pending.late | {*dims} - {last}
    sbp = way_back(base, late, shape, last, pending.home)
    if sbp == base.sbp and not pending.late:
        return NotImplemented
    if isinstance(x, Spectrum):
        bypass(x)
    early = [d for d in dims if d in split_dims(sbp)]
    first = pending.after_steps(split_dims(sbp))
    y = transform.over(torch.fft.ifftn, first.base, early).to_global(sbp=sbp)
    # Zeros along the last dim come last, so that no transform works on them.
    y = first.after(y, first.late - {dims[-1]})
    y = transform.over(torch.fft.ifftn, y, {*dims[:-1]} - {*early})
    y = first.after(y, first.late & {dims[-1]})
    return transform.over(
        torch.fft.irfftn if is_real else torch.fft.ifftn, y, {dims[-1]} - {*early}
    )


def _shift(function: Any, x: Spectrum, dim: Any = None) -> Any:
    pending = x._pending
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = [d % x.dim() for d in dims]
    if pending.base is None or x._changed is not None or not dims:
        return NotImplemented

    def shift(t: Any, along: Collection[int]) -> Any:
        return function(t, [d for d in dims if d in along])

    later = pending.late & {*dims}
    now = {*dims} - later
    base = shift(pending.base, now) if now else pending.base
    steps = (*pending.steps, (shift, later)) if later else pending.steps
    return _derive_spectrum(x, replace(pending, base=base, steps=steps), tuple(x.shape))


# --- Slices --------------------------------------------------------------------------------------


def _ranges(x: T, index: Any) -> Ranges | None:
    """Return the cells of each dim that ``x[index]`` takes, if these are slices with cells."""
    try:
        by_dim = index_by_dim(index, x.dim())
    except NotImplementedError:
        return None
    if len(by_dim) != x.dim() or not all(isinstance(cells, slice) for cells in by_dim):
        return None
    ranges = tuple(range(*cells.indices(n)) for cells, n in zip(by_dim, x.shape, strict=True))
    return ranges if all(ranges) else None


def _take(x: Spectrum, index: Any) -> Any:
    """Compute a slice of a spectrum: first the cells that it takes of whole dims.

    Slices that take the same of these share one computation.
    """
    pending, ranges = x._pending, _ranges(x, index)
    if not pending.late or pending.around is not None or ranges is None or x._changed is not None:
        return NotImplemented
    blocked = pending.blocked
    own_ranges = tuple(range(n) if d in blocked else ranges[d] for d, n in enumerate(x.shape))
    if own_ranges == tuple(map(range, x.shape)):
        return NotImplemented
    bypass(x)
    part = pending.parts.get(own_ranges)
    if part is None:
        part = pending.parts[own_ranges] = _part(x, own_ranges)
    rest = [slice_of(r) if d in blocked else slice(None) for d, r in enumerate(ranges)]
    taken = part[tuple(rest)]
    # Its changes must reach other slices, even after the network has dropped ``x``.
    vars(taken)["_whole"] = x
    return taken


def _part(x: Spectrum, ranges: Ranges) -> GlobalTensor:
    """Compute the cells ``ranges``, which include all along the split dims with steps."""
    pending = x._pending
    base, blocked = pending.base, pending.blocked
    assert base is not None
    cells = [*map(slice_of, ranges)]
    with views.as_made(base):
        first = [
            slice(None) if d in pending.late else cells_of_dim
            for d, cells_of_dim in enumerate(cells)
        ]
        less = replace(pending, base=base[tuple(first)], parts={}).after_steps(
            pending.late - blocked
        )
        then = [
            cells_of_dim if d in pending.late - blocked else slice(None)
            for d, cells_of_dim in enumerate(cells)
        ]
        less = replace(less, base=less.base[tuple(then)])  # pyright: ignore
    part = compute_spectrum(new_spectrum(less, tuple(map(len, ranges)), x.dtype, x.device))
    weak, sbp = ref(x), part.sbp

    def make(_: object) -> T:
        return compute_spectrum(weak())[tuple(cells)].to_global(sbp=sbp)

    def write(_: object, changed: T) -> None:
        whole = weak()
        if whole is not None:
            note_change(whole, ranges)

    # Once ``x`` has cells, which may change, the part is linked to it.
    views.link(part, views.EmulatedView(base, make, write, True))
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
    if any(kept.step != 1 for kept in ranges) or value.is_copy_everywhere:
        return NotImplemented
    if value.placement != pending.layout[0]:
        return NotImplemented
    if base is None:
        around = {d: kept for d, kept in enumerate(ranges) if len(kept) < x.shape[d]}
        if partial_sum in value.sbp:
            value = value.to_global(sbp=without(value, frozenset(), frozenset(around)))
        modes = value.to(x.dtype)
        modes = modes.clone() if modes is value else modes
    else:
        around = {d: kept for d, kept in pending.around.items() if kept == ranges[d]}
        filled = pending.around.keys() - around.keys()
        is_cut = base._local.requires_grad and not torch.is_grad_enabled()
        if is_cut or filled & split_dims_of(base):
            return NotImplemented
        modes = pending.after(base, filled) if filled else base.clone()
        modes[
            tuple([slice(None) if d in around else slice_of(r) for d, r in enumerate(ranges)])
        ] = value

    def pad(t: Any, dims: Collection[int]) -> Any:
        widths: list[int] = []
        for d, n in reversed([*enumerate(x_shape)]):
            cells = around[d] if d in around and d in dims else range(n)
            widths += [cells.start, n - cells.stop]
        return F.pad(t, widths)

    x_shape = tuple(x.shape)
    steps = ((pad, frozenset(around)),) if around else ()
    x._pending = replace(pending, base=modes, around=around, steps=steps, zeros=None)
    return None


# --- Zeros ---------------------------------------------------------------------------------------


def zeros(scope: Scope, *size: Any, **options: Any) -> Any:
    """Return complex zeros without cells for ``torch.zeros(*size, **options)``.

    Returns ``NotImplemented`` if torch is to make them.
    """
    dtype = options.get("dtype")
    if dtype is None or not dtype.is_complex or not {*options} <= {"dtype", "device", "size"}:
        return NotImplemented
    shape = options.get("size", size[0] if len(size) == 1 else size)
    device = torch.empty(0, dtype=dtype, device=options.get("device")).device
    if isinstance(shape, int) or device.type not in (scope.placement.type, "meta"):
        return NotImplemented
    return _zeros(scope, (broadcast,) * scope.placement.axes, shape, dtype, device)


def _zeros(
    scope: Scope, sbp: NdSbp, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    if len(shape) != scope.dims or not scope.home:
        return NotImplemented
    home = tuple(map(split, scope.home))
    pending = Pending(home, None, zeros=(scope.placement, sbp), around={})
    return new_spectrum(pending, tuple(map(int, shape)), dtype, device)


def _zeros_like(x: GlobalTensor, **options: Any) -> Any:
    dtype, scope = options.get("dtype") or x.dtype, current_scope()
    if scope is None or not dtype.is_complex or not {*options} <= {"dtype"}:
        return NotImplemented
    if home_of(x) is None:
        return NotImplemented
    return _zeros(scope, x.sbp, tuple(x.shape), dtype, x.device)


def _new_zeros(x: GlobalTensor, *size: Any, **options: Any) -> Any:
    scope, dtype = current_scope(), options.get("dtype") or x.dtype
    if scope is None:
        return NotImplemented
    return zeros(scope, *size, **{"device": x.device, **options, "dtype": dtype})


def _text(x: Spectrum, *_: object, **__: object) -> str:
    # A text must not communicate.
    return f"GlobalTensor(shape={list(x.shape)}, dtype={x.dtype}, not computed yet)"


def _requires_grad(x: Spectrum, *_: object) -> bool:
    base = x._pending.base
    return base is not None and base._local.requires_grad


STEPS |= {
    T.__getitem__: _take,
    T.__setitem__: _assign,
    T.requires_grad.__get__: _requires_grad,  # pyright: ignore
    **dict.fromkeys((T.__repr__, T.__str__, T.__format__), _text),
    **{shift: partial(_shift, shift) for shift in (torch.fft.fftshift, torch.fft.ifftshift)},
}


def _enter(function: Any, step: Callable[..., Any]) -> None:
    """Register a step that may also work on an ordinary tensor."""
    STEPS[function] = step

    @entry(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = NotImplemented
        if current_scope() is not None and args and isinstance(args[0], GlobalTensor):
            result = step(*args, **kwargs)
        return (
            call_cached(GlobalTensor, function, args, kwargs)
            if result is NotImplemented
            else result
        )


_enter(torch.zeros_like, _zeros_like)
_enter(T.new_zeros, _new_zeros)
for _kind in ("fft", "ifft", "rfft", "irfft"):
    for _name in (_kind, f"{_kind}2", f"{_kind}n"):
        _enter(getattr(torch.fft, _name), partial(_transform, _name))
