"""New tensors from an existing one: of its shape, or with its values in another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpudist.checks.bits import digests_of
from gpudist.errors import PlanMismatch
from gpudist.geometry.layout import NdSbp, broadcast, partial_sum
from gpudist.sbp.call import Call, Function
from gpudist.sbp.registry import SbpSignature, compose, forms, name_of, register
from gpudist.sbp.scope import current_draws
from gpudist.sbp.signatures.elementwise import linear, linear_in, splits

# Terms of zero are zeros.
register(torch.zeros_like, torch.empty_like, any_float=True, any_cuts=True)(linear)
register(*forms("contiguous"), any_cuts=True)(linear)


@register(torch.ones_like, torch.full_like, any_float=True, any_cuts=True)
def numbers(call: Call, parts: int) -> list[SbpSignature]:
    """Keep the layout of the input, with copies in place of terms."""
    return [*splits(call), SbpSignature((partial_sum,), (broadcast,))]


def convert(
    x: Tensor, dtype: torch.dtype, memory_format: torch.memory_format = torch.preserve_format
) -> Tensor:
    """Return ``x`` in another dtype or order of dims in memory."""
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(convert, (x,), x, dtype, memory_format)
    return x.to(dtype, memory_format=memory_format)


@register(convert, any_cuts=True)
def cast(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear, except when rounding to integers."""
    signatures = list(splits(call))
    if torch.promote_types(call.tensors[0].dtype, call.outputs[0].dtype) == call.outputs[0].dtype:
        signatures.append(linear_in(call, (0,)))
    return signatures


@compose(Tensor.to)
def to(x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Convert to another dtype; the placement determines the device."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if len(args) > 1 and all(isinstance(argument, bool) for argument in args[-2:]):
        args, copy = args[:-1], args[-1]
    device, dtype, _, memory = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
    if device is not None and device.type != x.device.type:
        raise NotImplementedError(
            f"x.to({device}): the global tensor is on {x.device.type!r}, the device type of its "
            "placement; use x.to_global(placement) to move it"
        )
    is_cast = dtype is not None and dtype != x.dtype
    if is_cast or memory not in (None, torch.preserve_format):
        x = convert(x, dtype or x.dtype, memory or torch.preserve_format)
    return x.clone() if copy and not is_cast else x


@compose(Tensor.type)
def type_of(x: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Return the name of torch's type, or the tensor converted to a dtype or to such a type."""
    if dtype is None:
        return x._local.type()
    example = torch.empty(0, dtype=x.dtype, device=x.device).type(dtype)
    return to(x, example.device, example.dtype)


@compose(Tensor.cpu)
def cpu(x: Tensor, memory_format: Any = None) -> Tensor:
    return to(x, "cpu", memory_format=memory_format)


@compose(Tensor.type_as)
def type_as(x: Tensor, other: Tensor) -> Tensor:
    return to(x, other.dtype)


def enter_cast(name: str, dtype: torch.dtype) -> None:
    """Register ``x.float()`` and the like."""
    compose(getattr(Tensor, name))(
        lambda x, memory_format=None: to(x, dtype, memory_format=memory_format)
    )


for name in (
    "float",
    "double",
    "half",
    "bfloat16",
    "int",
    "long",
    "bool",
    "short",
    "cfloat",
    "cdouble",
):
    enter_cast(name, getattr(torch, name))
enter_cast("byte", torch.uint8)
enter_cast("char", torch.int8)


def block(x: Any, whole: Tensor, sbp: NdSbp, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return this rank's part of ``whole`` on the placement of ``x``.

    Ranks outside of the placement, which may not hold ``whole``, pass its global ``shape``.
    """
    shape = tuple(whole.shape) if shape is None else shape
    index = x.placement.index
    if index is None:
        return x._wrap(whole.new_empty(0), x.placement, sbp, shape)
    cells = x.placement.layout(sbp, shape).box(index).slices
    return x._wrap(whole[cells].clone(), x.placement, sbp, shape)


def copies_of_whole(x: Any, whole: Tensor) -> Tensor:
    """Return ``whole``, equal on all ranks, as copies on the placement of ``x``, if it has one."""
    if not hasattr(x, "placement"):
        return whole
    return block(x, whole, (broadcast,) * x.placement.axes)


def draw_whole(function: Function, changes_in_place: bool) -> Function:
    """Return a function that draws the values of the global tensor, in any layout.

    Every rank draws all values, so that equal generators stay equal. If ranks hold copies, which
    replace terms, torch's seed must be the same on all of them.

    Raises:
        PlanMismatch: on every rank, if the generators of ranks with copies are in other states.
    """

    def draw(tensor: Any, *args: Any, **kwargs: Any) -> Tensor:
        if any(isinstance(argument, Tensor) for argument in (*args, *kwargs.values())):
            raise NotImplementedError(
                f"{name_of(function)} of a global tensor: an argument is a tensor; pass numbers"
            )
        sbp = tuple(
            broadcast if attribute == partial_sum else attribute for attribute in tensor.sbp
        )
        if broadcast in sbp and function is not torch.nn.init.constant_:
            _require_equal_generators(name_of(function), tensor, kwargs.get("generator"))
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        whole = function(whole, *args, **kwargs)
        if not changes_in_place:
            return block(tensor, whole, sbp)
        with torch.no_grad():
            return tensor.copy_(block(tensor, whole, sbp))

    return draw


def _require_equal_generators(name: str, x: Any, generator: torch.Generator | None) -> None:
    """Raise if ranks would draw other values; a converted network has equal generators."""
    P = x.placement.partition
    if not P.active or current_draws() is not None or x.device.type == "meta":
        return
    # States are in the memory of the host.
    states = torch.cuda if x.is_cuda else torch.random
    state = states.get_rng_state() if generator is None else generator.get_state()
    rows = P.allgather_data(digests_of([state]))
    if len({number for (number,) in rows}) > 1:
        raise PlanMismatch(
            f"{name} of a global tensor with copies, {x.sbp}: the random generators of its ranks "
            "are in different states, so that the copies would differ; call torch.manual_seed with "
            "one seed on every rank before, or draw on one rank and broadcast"
        )


compose(torch.randint_like)(draw_whole(torch.randint_like, False))
init = torch.nn.init
for function in (
    *(init.normal_, init.uniform_, init.constant_, init.kaiming_uniform_, init.kaiming_normal_),
):
    compose(function)(draw_whole(function, True))


def enter_new(function: Function) -> None:
    """Register a function that creates a tensor of a given shape, as copies."""

    @compose(function)
    def create(x: Any, *args: Any, **kwargs: Any) -> Tensor:
        whole = function(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)
        local = whole if x.placement.active else whole.new_empty(0)
        return x._wrap(local, x.placement, (broadcast,) * x.placement.axes, tuple(whole.shape))


for function in (Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty):
    enter_new(function)
