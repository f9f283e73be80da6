"""Table of methods of global tensors that need no operator, and those of autograd."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from gpudist.checks.storage import BATCHED_GRADIENTS
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.layout import Layout, broadcast, partial_sum
from gpudist.sbp import views
from gpudist.sbp.boxing import box
from gpudist.sbp.copies import copy_of
from gpudist.sbp.scope import current_scope
from gpudist.sbp.terms import sums_at_leaves

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor

T = torch.Tensor
# A method that returns NotImplemented leaves the call to the table of operators.
METHODS: dict[Any, Callable[..., Any]] = {}


def _getters(*names: str) -> list[Any]:
    return [getattr(T, name).__get__ for name in names]


# Questions that the wrapper answers, since it has the global shape and dtype.
METADATA = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "itemsize", "is_cuda", "is_cpu"),
    *_getters("is_sparse", "is_quantized", "is_meta", "is_nested", "is_mkldnn"),
    *_getters("is_mps", "is_xpu", "is_mtia", "is_xla", "is_sparse_csr", "nbytes", "is_ipu"),
    *_getters("is_maia", "is_vulkan", "grad_dtype", "name", "output_nr", "_base"),
    T.size, T.dim, T.numel, T.nelement, T.ndimension, T.element_size, T.stride, T.storage_offset,
    T.is_floating_point, T.is_complex, T.is_contiguous, T.is_signed, T.__len__, T.is_inference,
    T.is_conj, T.is_neg, torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor,
    torch.is_inference, torch.is_signed, T.get_device, torch.get_device, T.is_pinned, torch.is_conj,
    torch.is_neg, T.is_shared, T.is_distributed, torch.is_distributed, T._is_view, T.dim_order,
}  # fmt: skip


def entry(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an implementation of torch's ``functions``, or of calls of a kind of layer."""

    def enter(method: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            METHODS[function] = method
        return method

    return enter


def _attribute_of_part(name: str, x: GlobalTensor, *_: object) -> Any:
    return getattr(x._local, name)


for _name in ("grad_fn", "is_leaf", "retains_grad", "_version"):
    entry(getattr(T, _name).__get__)(partial(_attribute_of_part, _name))


@entry(T.requires_grad.__get__)  # pyright: ignore
def requires_grad(x: GlobalTensor, *_: object) -> bool:
    source: Any = views.source_of(x)
    return source._local.requires_grad


@entry(T.data_ptr)
def data_ptr(x: GlobalTensor) -> int:
    return x._local.data_ptr()


@entry(T.requires_grad_, T.requires_grad.__set__)  # pyright: ignore
def set_requires_grad(x: GlobalTensor, wanted: bool = True) -> GlobalTensor:
    x._local.requires_grad_(wanted)
    watch(x)
    return x


def watch(x: GlobalTensor) -> None:
    """Convert the gradient of a leaf to the leaf's own attributes, once in every backward.

    Torch runs a leaf's hook after adding up the gradients of all its uses.
    """
    local, layout = x._local, x.global_layout
    if not (local.requires_grad and local.is_leaf) or hasattr(local, "_gpudist_watched"):
        return
    if layout.dual == layout:
        return
    world = x.placement.partition.world
    # Without a gradient on any worker there is none to convert.
    local.register_hook(lambda g: None if g is None else box(g, layout.dual, layout, world))
    vars(local)["_gpudist_watched"] = True


class GradientLayout:
    """Layout of the gradient of a tensor: dual attributes, or for a leaf its own.

    Hooks keep it in place of the tensor, which keeps the graph that keeps its hooks.
    """

    def __init__(self, x: GlobalTensor) -> None:
        self._layout = x.global_layout if x._local.is_leaf else x.global_layout.dual
        self._placement, self._wrap = x.placement, x._wrap

    def wrap(self, local: torch.Tensor) -> GlobalTensor:
        return self._wrap(local, self._placement, self._layout.sbp, self._layout.shape)

    def part_of(self, gradient: GlobalTensor) -> torch.Tensor:
        return gradient.to_global(self._placement, self._layout.sbp)._local


def gradient_of(x: GlobalTensor, local: torch.Tensor) -> GlobalTensor:
    """Wrap ``local`` as the gradient of ``x``."""
    if x._local.is_leaf and local.dtype == x._global_spec.dtype:
        return x._with_part(local)
    return GradientLayout(x).wrap(local)


@entry(T.grad.__get__)  # pyright: ignore
def get_grad(x: GlobalTensor, *_: object) -> GlobalTensor | None:
    local = x._local.grad
    return None if local is None else gradient_of(x, local)


@entry(T.grad.__set__, T.grad.__delete__)  # pyright: ignore
def set_grad(x: GlobalTensor, value: GlobalTensor | None = None) -> None:
    may_take(x, value, "grad")
    x._local.grad = None if value is None else GradientLayout(x).part_of(value)


def require_own_graph(x: Any) -> Any:
    """Return ``x``, through which all gradients of what was computed from it pass.

    Raises:
        RuntimeError: slices or transforms of a spectrum have been computed before the spectrum.
    """
    if "_is_bypassed" in getattr(x, "__dict__", ()):
        raise RuntimeError(
            f"the gradient of this spectrum of shape {list(x.shape)} is incomplete: slices or "
            "transforms of it have been computed from the tensor that it transforms; register "
            "the hook, or call retain_grad, before you use the spectrum, or clone it first"
        )
    return x


@entry(T.retain_grad)
def retain_grad(x: GlobalTensor) -> None:
    require_own_graph(x)._local.retain_grad()


@entry(T.register_hook)
def register_hook(x: GlobalTensor, hook: Callable[[GlobalTensor], GlobalTensor | None]) -> Any:
    """Register a hook that receives, and may return, a global gradient."""
    return require_own_graph(x)._local.register_hook(hook_of_part(x, hook))


def hook_of_part(x: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook of the part of ``x`` that calls a hook of ``x``."""
    layout = GradientLayout(x)

    def local_hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            # The leaf is a parameter that a call of its network has not used.
            return None
        changed = hook(layout.wrap(gradient))
        return None if changed is None else layout.part_of(changed)

    return local_hook


@entry(T.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(x: GlobalTensor, hook: Callable[[Any], None]) -> Any:
    return x._local.register_post_accumulate_grad_hook(later_hook_of_part(x, hook))


def later_hook_of_part(x: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook of the part of a leaf ``x`` that calls a hook of ``x`` after accumulation."""
    weak = ref(x)  # The part must not keep the tensor, which keeps the part.

    def local_hook(_: torch.Tensor) -> None:
        leaf = weak()
        if leaf is not None:
            hook(leaf)

    return local_hook


@entry(T.detach, torch.detach)
def detach(x: GlobalTensor) -> GlobalTensor:
    return views.follow(x, x.like(x._local.detach()), detach)


@entry(T.detach_)
def detach_in_place(x: GlobalTensor) -> GlobalTensor:
    x._local.detach_()
    return x


@entry(T.data.__get__)  # pyright: ignore
def get_data(x: GlobalTensor, *_: object) -> GlobalTensor:
    return views.follow(x, x.like(x._local.data), get_data)


@entry(T.data.__set__)  # pyright: ignore
def set_data(x: GlobalTensor, value: GlobalTensor) -> None:
    may_take(x, value)
    value = value.to_global(x.placement, x.sbp if x.shape == value.shape else None)
    x._local.data = value._local
    if (x.dtype, x.shape) != (value.dtype, value.shape):
        take_metadata(x, value)


# Question of torch's setter of ``data``, which asks no other protocol of Python.
MAY_TAKE_DATA: Any = torch.ops.aten._has_compatible_shallow_copy_type.default


def may_take(x: Any, value: Any, name: str = "data") -> bool:
    """Return ``True`` if ``value`` can be assigned to the attribute ``name`` of ``x``.

    Raises:
        PartitionError: one of them is a global tensor and the other one is plain, or ``x`` is a
            parameter in parts of another shape.
    """
    kinds = ["global" if hasattr(y, "_local") else "plain" for y in (x, value)]
    if value is not None and (
        kinds[0] != kinds[1] or (hasattr(x, "placed") and x.shape != value.shape)
    ):
        raise PartitionError(
            f"{name}: a {kinds[1]} tensor of shape {list(value.shape)} is assigned to a {kinds[0]} "
            f"one of shape {list(x.shape)}; assign value.full_tensor() to a plain tensor, "
            "gpudist.to_global(value, x.placement, sbp) to a global one, and a tensor of the same "
            "shape to a parameter in parts"
        )
    return True


def take_metadata(x: GlobalTensor, other: GlobalTensor) -> None:
    """Give ``x`` the shape, dtype and spec of ``other``, but not its part."""
    with torch._C.DisableTorchFunctionSubclass():
        data: Any = T.data
        data.__set__(x, other)
    x._global_spec = other._global_spec


@entry(torch._has_compatible_shallow_copy_type)  # pyright: ignore
def may_replace_data(x: Any, other: Any) -> bool:
    """Return whether ``x.data = other`` is possible, so that a module keeps its parameters."""
    return hasattr(x, "_local") and hasattr(other, "_local")


def seed(x: GlobalTensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's part of the initial gradient of a backward from ``x``.

    The initial gradient of a scalar counts once: if ``x`` is a copy, the first rank starts with it
    and the others with zero.
    """
    target = x.global_layout.dual
    world = x.placement.partition.world
    if gradient is None:
        if x.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        index = x.placement.index or ()
        is_first = not any(
            i for i, attribute in zip(index, x.sbp, strict=False) if attribute == broadcast
        )
        return torch.full_like(x._local.detach(), float(is_first))
    if hasattr(gradient, "_local"):
        global_gradient: Any = gradient
        return box(global_gradient._local, global_gradient.global_layout, target, world)
    if tuple(gradient.shape) != tuple(x.shape):
        raise RuntimeError(
            f"backward: the gradient has shape {list(gradient.shape)}, but the tensor has global "
            f"shape {list(x.shape)}; pass a gradient of that shape"
        )
    copies: Layout = x.placement.copies(tuple(x.shape))
    if not x.placement.active:
        gradient = gradient.reshape(-1)[:0]
    return box(gradient, copies, target, world)


@entry(T.backward)
def backward(
    x: GlobalTensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    backward_of_all(x, gradient, retain_graph, create_graph, inputs=inputs)


@entry(torch.autograd.backward)
def backward_of_all(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Compute ``torch.autograd.backward`` of global and plain tensors, in one backward.

    Within a converted network, the gradient of a plain leaf is summed over the workers.
    """
    if grad_variables is not None:
        raise TypeError("backward: grad_variables was renamed; pass grad_tensors")
    ends = _as_list(tensors)
    starts = _seeds(ends, grad_tensors)
    if inputs is not None:
        inputs = [getattr(require_own_graph(leaf), "_local", leaf) for leaf in _as_list(inputs)]
    pairs = [
        (getattr(x, "_local", x), start)
        for x, start in zip(ends, starts, strict=True)
        # Outside its placement, a tensor may have no graph.
        if not hasattr(x, "_local") or x.placement.active or x._local.requires_grad
    ]
    if pairs:
        local, starts = zip(*pairs, strict=True)
        with sums_at_leaves(current_scope()):
            torch.autograd.backward(local, starts, retain_graph, create_graph, inputs=inputs)


def _seeds(ends: list[Any], gradients: Any) -> list[Any]:
    starts = [None] * len(ends) if gradients is None else _as_list(gradients)
    if len(starts) != len(ends):
        raise RuntimeError(f"{len(ends)} tensors need as many initial gradients, not {len(starts)}")
    return [
        seed(end, start) if hasattr(end, "_local") else start
        for end, start in zip(ends, starts, strict=True)
    ]


@entry(torch.autograd.grad)
def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Compute ``torch.autograd.grad`` of global tensors.

    A gradient has the dual attributes of its tensor; the gradient of a leaf has the leaf's
    attributes. Within a converted network, the gradient of a plain tensor is summed over the
    workers.

    Raises:
        ShapeError: ``is_grads_batched=True``.
    """
    if others.get("is_grads_batched"):
        raise ShapeError(f"torch.autograd.grad: {BATCHED_GRADIENTS}")
    ends = _as_list(outputs)
    starts = _as_list(inputs)
    scope = current_scope()
    if scope is not None:
        starts = [copy_of(scope, x) for x in starts]
    seeds = _seeds(ends, grad_outputs)
    gradients = torch.autograd.grad(
        [getattr(end, "_local", end) for end in ends],
        [getattr(require_own_graph(start), "_local", start) for start in starts],
        seeds, retain_graph, create_graph, allow_unused=allow_unused, **others,
    )  # fmt: skip
    first: Any = next((x for x in (*ends, *starts) if hasattr(x, "_local")), None)

    def whole(x: Any, g: Any) -> Any:
        if g is None or first is None:
            return g
        if hasattr(x, "_local"):
            return gradient_of(x, g)
        if scope is None:
            return g
        terms = first._wrap(g, first.placement, (partial_sum,) * first.placement.axes, g.shape)
        return terms.to_global(sbp=(broadcast,) * first.placement.axes)

    return tuple(whole(x, g) for x, g in zip(starts, gradients, strict=True))


@entry(torch.nn.functional.l1_loss)
def l1_loss(*args: Any, **kwargs: Any) -> Any:
    """Pass on the ``weight``, which torch 2.13 keeps from ``__torch_function__``."""
    function = torch.nn.functional.l1_loss
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    weight = None if frame is None or "weight" in kwargs else frame.f_locals.get("weight")
    if weight is None:
        return NotImplemented
    kinds = [type(x) for x in (*args, weight) if hasattr(x, "_local")]
    kind = max(kinds, key=lambda kind: len(kind.__mro__))
    return kind.__torch_function__(function, kinds, args, {**kwargs, "weight": weight})


def _as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reshape_in_place(out_of_place: Callable[..., Any]) -> Callable[..., GlobalTensor]:
    """Return the function that gives its tensor the shape and the part of a view of it."""

    def change(x: GlobalTensor, *args: Any, **kwargs: Any) -> GlobalTensor:
        name = f"{out_of_place.__name__}_"
        if x._local.is_leaf and x._local.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name}: the tensor is a leaf that requires grad")
        view: Any = out_of_place(x, *args, **kwargs)
        if views.may_be_followed(x) or views.is_copy(view):
            raise NotImplementedError(
                f"{name}: other tensors would follow this one, and their cells had to be copied; "
                f"use y = x.{out_of_place.__name__}(...)"
            )
        take_metadata(x, view)
        x._local = view._local
        return x

    return change


for _function in (T.unsqueeze, T.squeeze, T.transpose, T.t, T.swapaxes, T.swapdims):
    entry(getattr(T, f"{_function.__name__}_"))(_reshape_in_place(_function))


@entry(torch._make_dual, torch._unpack_dual)  # pyright: ignore
def refuse_forward_mode(x: GlobalTensor, *_: object, **__: object) -> Any:
    raise NotImplementedError(
        "forward mode cannot trace global tensors; use torch.autograd.grad, or x.to_local()"
    )
