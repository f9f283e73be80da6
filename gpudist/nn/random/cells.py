"""Random values of a global tensor, of which each worker draws only its own block.

The native core draws a block in one pass, on a CPU and on a GPU. Where it cannot, torch's
operations draw the same numbers (:mod:`gpudist.nn.random.composed_cells`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from gpudist.checks.storage import storage_problem
from gpudist.errors import GpudistError
from gpudist.exchange.tracing import is_eager, is_recorded
from gpudist.geometry.boxes import Box
from gpudist.native import native as _native
from gpudist.nn.kernel_choice import NATIVE_FLOATS
from gpudist.nn.random import composed_cells
from gpudist.transport.nccl.streams import stream_of

if TYPE_CHECKING:
    from gpudist._native import Draw

_WORD = 1 << 64


class Key(NamedTuple):
    """Key of the numbers of one call: a seed and a call number, or what a draw stored.

    Attributes:
        seed, call: a number, or a tensor of one int64.
        stored: key that an earlier draw has written, which replaces both.
    """

    seed: torch.Tensor | int
    call: torch.Tensor | int
    stored: torch.Tensor | None = None

    def as_tensor(self, device: torch.device) -> torch.Tensor:
        """Return the key for the composition, one int64."""
        if self.stored is not None:
            return self.stored
        numbers = [
            x if isinstance(x, torch.Tensor) else torch.tensor(x, device=device) for x in self[:2]
        ]
        return composed_cells.mix_key(*numbers)


class Cells(NamedTuple):
    """Global indices of a block's cells.

    Attributes:
        box: box of the block in the leading dims; cells that differ in the other dims alone have
            the same index.
        shape: global shape of the leading dims.
    """

    box: Box
    shape: tuple[int, ...]

    @classmethod
    def leading(cls, box: Box, shape: Sequence[int], dims: int) -> Cells:
        """Return the indices of a block's cells in the first ``dims`` dims alone."""
        return cls(Box(box.start[:dims], box.stop[:dims]), tuple(shape[:dims]))


def draw_kept(key: Key, cells: Cells, p: float, device: torch.device) -> torch.Tensor:
    """Draw which of ``cells`` are kept, each dropped with probability ``p``.

    The result for a cell depends on the key and the cell's global index, but not on the worker that
    owns it.

    Args:
        key: seed and number of the call.
        cells: global indices of the block's cells.
        p: probability of dropping a cell, between 0 and 1 exclusive.
        device: device of the result.

    Returns:
        New bool tensor of the shape of the block, true for kept cells.

    Cost:
        One pass over the result; no communication.
    """
    composed = partial(composed_cells.fill_kept, dropped_below=drop_threshold(p))
    return _draw_block("kept", composed, key, cells, torch.bool, device, p)


def uniform_by_index(
    key: Key, cells: Cells, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Draw uniform numbers in [0, 1), multiples of a step that the dtype represents exactly.

    A number depends on the same quantities as in :func:`draw_kept`, which describes the
    arguments.

    Returns:
        New tensor of ``dtype``, of the shape of the block.
    """
    return _draw_block("uniform", composed_cells.fill_uniform, key, cells, dtype, device)


def normal_by_index(
    key: Key, cells: Cells, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Draw standard normal numbers; for the arguments see :func:`uniform_by_index`."""
    return _draw_block("normal", composed_cells.fill_normal, key, cells, dtype, device)


def _draw_block(
    kind: str,
    composed: Callable[..., None],
    key: Key,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device,
    p: float = 0.0,
) -> torch.Tensor:
    if not is_eager() and not is_recorded():
        # Transforms of torch.func would wrap the new tensor.
        with temporarily_clear_interpreter_stack():
            return _draw_plainly(kind, composed, key, cells, dtype, device, p)
    return _draw_plainly(kind, composed, key, cells, dtype, device, p)


def _draw_plainly(
    kind: str,
    composed: Callable[..., None],
    key: Key,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device,
    p: float,
) -> torch.Tensor:
    drawn = torch.empty(cells.box.shape, dtype=dtype, device=device)
    if draws_natively(drawn, kind):
        draw(kind, drawn, key, cells, p=p)
    else:
        composed(drawn, key.as_tensor(device), *cells)
    return drawn


def bernoulli_by_index(
    key: Key,
    cells: Cells,
    dtype: torch.dtype,
    device: torch.device,
    probability: torch.Tensor | float,
) -> torch.Tensor:
    """Draw ones where the uniform number is below the probability, and zeros elsewhere.

    Args:
        key ... device: see :func:`uniform_by_index`.
        probability: of a one; a number, or a tensor of the same shape, dtype and device.
    """
    by_cell = probability if isinstance(probability, torch.Tensor) else None
    drawn = torch.empty(cells.box.shape, dtype=dtype, device=device)
    if not draws_natively(drawn) or not (by_cell is None or has_memory(by_cell)):
        return (uniform_by_index(key, cells, dtype, device) < probability).to(dtype)
    factor = 0.0 if isinstance(probability, torch.Tensor) else _round(probability, dtype)
    draw("bernoulli", drawn, key, cells, input=by_cell, factor=factor)
    return drawn


@lru_cache
def _round(x: float, dtype: torch.dtype) -> float:
    return torch.tensor(x, dtype=dtype, device="cpu").item()


def has_memory(x: torch.Tensor) -> bool:
    """Return whether the values of ``x`` are where its strides say."""
    return is_eager(x) and not (storage_problem(x) or x.is_neg() or x._is_zerotensor())


@lru_cache
def drop_threshold(p: float) -> int:
    """Return the number, as a signed one, below which those of dropped cells are."""
    return int(p * 2.0**64) - (1 << 63)


@lru_cache
def _draws_on(device: torch.device) -> bool:
    if device.type == "meta":
        return True
    if _native is None or device.type not in ("cpu", "cuda"):
        return False
    return device.type == "cpu" or _native.cuda_information() is not None


def draws_natively(output: torch.Tensor, kind: str = "") -> bool:
    """Return whether the native core can draw a new tensor of this dtype and device."""
    is_drawn = output.dtype == torch.bool if kind == "kept" else output.dtype in NATIVE_FLOATS
    return is_drawn and _draws_on(output.device) and not is_recorded(output)


def changes_natively(x: torch.Tensor) -> bool:
    """Return whether the native core can draw which floats of ``x`` to change, and change them."""
    return x.dtype in NATIVE_FLOATS and _draws_on(x.device) and has_memory(x)


def draw(
    kind: str,
    output: torch.Tensor,
    key: Key,
    cells: Cells,
    *,
    input: torch.Tensor | None = None,
    p: float = 0.0,
    factor: float = 0.0,
    stores_key: torch.Tensor | None = None,
) -> None:
    """Draw all cells of a new tensor by the native core; nothing if it has no data.

    Args:
        kind: name of a ``Draw`` of the native core.
        output: new tensor without gaps in memory, for which :func:`draws_natively` is true.
        key: key of the numbers.
        cells: global indices of the cells.
        input: tensor of the same shape, dtype and device; any strides.
        p: probability of dropping a cell.
        factor: factor of kept cells, or probability of a one.
        stores_key: one int64 to which the key is written.
    """
    if output.is_meta:
        return
    device = output.device
    seed, call, stored, value = _addresses(key, device)
    on_gpu = device.type == "cuda"
    _native.draw(
        _draw_of(kind),
        NATIVE_FLOATS.get(output.dtype, _native.Dtype.float32),
        output.shape,
        cells.box.start,
        cells.shape,
        () if input is None else input.stride(),
        output.stride(),
        0 if input is None else input.data_ptr(),
        output.data_ptr(),
        seed,
        call,
        stored,
        value,
        0 if stores_key is None else stores_key.data_ptr(),
        drop_threshold(p),
        factor,
        device.index if on_gpu else -1,
        _stream_of(device)() if on_gpu else 0,
    )


@lru_cache
def _draw_of(kind: str) -> Draw:
    return getattr(_native.Draw, kind)


_stream_of = lru_cache(stream_of)


def _addresses(key: Key, device: torch.device) -> tuple[int, int, int, int]:
    """Return addresses of seed, call and stored key, and the seed or the key as a number."""
    seed, call, stored = key
    if stored is not None:
        return 0, 0, stored.data_ptr(), 0
    if isinstance(call, torch.Tensor):
        if call.device == device:
            if isinstance(seed, int):
                return 0, call.data_ptr(), 0, seed % _WORD
            return seed.data_ptr(), call.data_ptr(), 0, 0
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise GpudistError(
                "random numbers are drawn in a CUDA graph, but seed and call number are on "
                f"{call.device}, so that every replay would repeat them: move the layer to {device}"
            )
    return 0, 0, 0, _native.random_key(int(seed) % _WORD, int(call) % _WORD)
