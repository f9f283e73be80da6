"""NumPy and CuPy arrays in place of tensors; torch accesses their memory through DLPack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.compiler import is_dynamo_compiling

from gpudist.errors import ShapeError

if TYPE_CHECKING:
    from gpudist.ops.operator import Operator

# Or cupy.ndarray, which has no type stubs.
Array = TypeVar("Array", torch.Tensor, NDArray[Any])

# Kinds of input, as exchanged between ranks.
TENSOR, NUMPY, CUPY = range(3)

# CuPy streams kept alive: when torch frees an output, it records an event on the output's streams.
_kept_streams: set[Any] = set()


def apply_to_array(operator: Any, x: Array | None) -> Array:
    """Apply ``operator`` to a tensor, or to a NumPy or CuPy array, and return the same kind.

    Autograd ignores arrays, and they must not be used under torch.compile. If ``x`` is ``None``,
    and the operator accepts it and has agreed on the block, the result has the kind of the owner's
    input.

    Returns:
        New tensor or array, whose memory belongs to torch and lives as long as the array.

    Cost:
        No copies, except of inputs that DLPack or torch cannot describe: negative strides, and
        strides that are not a multiple of the item size. If CuPy's current stream differs from
        torch's, a CuPy array costs one event before and one after, and the stream is kept until the
        process ends.

    Raises:
        ShapeError: the array has a dtype that torch lacks, or is not on the partition's device; see
            :meth:`~gpudist.transport.Transport.reject`.
    """
    if isinstance(x, torch.Tensor):
        # Not a call of a module: the operator behind a function has no hooks.
        return operator.forward(x)
    return _apply_to_other(operator, x)


def _apply_to_other(operator: Operator, x: Any) -> Any:
    if is_dynamo_compiling():
        return operator(x)
    agreement, device = operator.agreement, operator.P_x.device
    if x is None:
        nothing: Any = None
        y = operator(nothing)
        return _with_kind(agreement.owners_kind, device, lambda: y)
    try:
        kind = _kind_of(x)
        seen = _tensor_of(x, kind, device)
    except ShapeError as error:
        agreement.reject(ShapeError(f"{type(operator).__name__}: {error}"))
    agreement.kind = kind
    try:
        return _with_kind(kind, device, lambda: operator(seen))
    finally:
        agreement.kind = TENSOR


def _with_kind(kind: int, device: torch.device, run: Callable[[], torch.Tensor]) -> Any:
    if kind == CUPY:
        return _cupy_array_of(device, run)
    return _numpy_array_of(run()) if kind == NUMPY else run()


def _kind_of(x: object) -> int:
    if type(x).__module__.partition(".")[0] == "cupy":
        return CUPY
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        return NUMPY
    raise ShapeError(
        f"the input is a {type(x).__module__}.{type(x).__qualname__}; it must be a torch tensor, "
        "a NumPy array without a mask, or a CuPy array"
    )


def _tensor_of(x: Any, kind: int, device: torch.device) -> torch.Tensor:
    """Return a tensor on the memory of ``x``, or on a copy if torch cannot describe it."""
    name = "CuPy" if kind == CUPY else "NumPy"
    where = torch.device("cuda", x.device.id) if kind == CUPY else torch.device("cpu")
    if where != device:
        raise ShapeError(
            f"the {name} array is on {where} but the partition's device is {device}; move it "
            "there with cupy.asarray or cupy.asnumpy"
        )
    # _in_stream_order orders the streams.
    export = _capsule if kind == CUPY else _itself
    try:
        if any(stride < 0 for stride in x.strides):
            # torch 2.13 aborts the process at a negative stride.
            return torch.from_dlpack(export(x.copy()))
        try:
            return torch.from_dlpack(export(x))
        except BufferError:
            return torch.from_dlpack(export(x.copy()))
    except (BufferError, RuntimeError) as error:
        raise ShapeError(f"torch cannot read a {name} array of dtype {x.dtype}: {error}") from error


def _itself(x: Any) -> Any:
    return x


def _capsule(x: Any) -> Any:
    return x.__dlpack__(stream=-1)


def _numpy_array_of(y: torch.Tensor) -> NDArray[Any]:
    try:
        # numpy.from_dlpack is not used, because its arrays are read-only before NumPy 2.1.
        return y.numpy()
    except TypeError as error:
        raise ShapeError(f"NumPy does not have the output's dtype {y.dtype}: {error}") from error


def _cupy_array_of(device: torch.device, run: Callable[[], torch.Tensor]) -> Any:
    import cupy  # pyright: ignore[reportMissingImports]

    with _in_stream_order(cupy, device) as keep:
        y = run()
        keep(y)
    return cupy.from_dlpack(_capsule(y))


@contextmanager
def _in_stream_order(cupy: Any, device: torch.device) -> Iterator[Callable[[torch.Tensor], None]]:
    """Order the body's work on torch's current stream between CuPy's earlier and later work.

    Yields a function to call with each tensor that CuPy continues to use.
    """
    ours = torch.cuda.current_stream(device)
    # CuPy has a current stream per device; without an index it returns that of its current device.
    stream = cupy.cuda.get_current_stream(device.index)
    if stream.ptr == ours.cuda_stream:
        yield lambda y: None
        return
    theirs = torch.cuda.ExternalStream(stream.ptr, device)

    def keep(y: torch.Tensor) -> None:
        # Otherwise torch may reuse the memory while CuPy's stream still reads it.
        y.record_stream(theirs)
        _kept_streams.add(stream)

    ours.wait_stream(theirs)
    try:
        yield keep
    finally:
        # Also after an error, because torch may still read memory that CuPy would reuse.
        theirs.wait_stream(ours)
