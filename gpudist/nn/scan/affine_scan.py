"""Affine scan over a split sequence: the recurrence of linear attention and state space models."""

from __future__ import annotations

import torch

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.nn.scan.block_scan import CELLS, MATRICES, block_scan
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import cached_operator
from gpudist.ops.shape_agreement import ShapeMode, refuse
from gpudist.world.partition import CartesianPartition


@checked()
def affine_scan(
    a: torch.Tensor,
    b: torch.Tensor,
    P_x: CartesianPartition,
    dim: int = 1,
    *,
    matrix: bool = False,
    reverse: bool = False,
    seq_idx: torch.Tensor | None = None,
    shape: ShapeMode = "static",
) -> torch.Tensor:
    """Return the states ``h[t] = a[t] h[t - 1] + b[t]`` along a split dim; ``h[-1]`` is zero.

    Collective over the workers along axis ``dim`` of ``P_x``. Each worker scans its block from a
    zero state; :func:`carried_state` then sends one state per worker, with which each worker
    corrects its block.

    Args:
        a: block of the factors, with the dims of ``b``. Dims of extent 1 are broadcast: a scalar
            per head as in Mamba-2, or a vector as in gated linear attention. The last two dims of a
            matrix are ``[K, K]``, as in the gated delta rule.
        b: block of the terms, for example ``[B, T, H, K, V]``; may be uneven or empty along
            ``dim``.
        P_x: partition with one axis per dim of ``b``.
        dim: dim of the sequence.
        matrix: multiply states by matrices, ``a @ h``, instead of cell by cell.
        reverse: scan from the last cell to the first: ``h[t] = a[t] h[t + 1] + b[t]``.
        seq_idx: integer block ``[B, T]``, number of the document of each cell, if several are
            packed into a sequence. Wherever the number changes, the state starts from zero.
        shape: ``"dynamic"`` makes the ranks agree on the batch and features at every call; the
            length of a block may always change.

    Returns:
        New tensor: this worker's block of the states, in the promoted dtype of ``a`` and ``b``,
        computed in at least single precision. A clone of ``b`` on workers outside ``P_x``.

    Adjoint:
        Linear in ``b``; the adjoint is the scan in the other direction with adjoint factors, each
        used one step earlier. The gradient of ``a[t]`` is that of ``h[t]`` times ``h[t - 1]``. If
        workers hold copies of a factor, each gets its own part of the gradient.

    Cost:
        The messages of :func:`carried_state`, about 4 products per step, and memory for all
        states. Fused kernels that keep only some of them can call :func:`carried_state`.

    Raises:
        PartitionError: on every rank alike, if ``P_x`` splits the rows of matrices.
        ShapeError: on every rank alike, if ``dim`` is out of range, or if ``P_x``, ``a``, ``b`` and
            ``seq_idx`` do not match.

    Source:
        Martin & Cundy 2018, arXiv:1709.04057; Dao & Gu 2024, arXiv:2405.21060.
    """
    dim = _dim_of("affine_scan", a, b, seq_idx, P_x, dim, matrix)
    if not P_x.active:
        return b.clone()
    dtype = torch.promote_types(a.dtype, b.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    product = MATRICES if matrix else CELLS
    with torch.autocast(b.device.type, enabled=False):
        factors, terms = a.to(wide), b.to(wide)
        if a.shape[dim] != b.shape[dim]:
            factors = factors.expand(*a.shape[:dim], b.shape[dim], *a.shape[dim + 1 :])
        if seq_idx is not None:
            factors = torch.where(_where_documents_start(seq_idx, b, dim, reverse), 0, factors)
        factors, terms = (
            _sequence_first(factors, dim, reverse),
            _sequence_first(terms, dim, reverse),
        )
        own_states = block_scan(factors, terms, torch.zeros_like(terms[:1].sum(0)), product)
        identity = product.one(factors[:1].sum(0))
        kept = block_scan(factors, torch.zeros_like(factors), identity, product)
        # Also an empty block has its factor and state in the graph.
        of_block = kept[-1] if len(kept) else identity + factors.sum(0)
        end = own_states[-1] if len(own_states) else terms.sum(0)
        entering = carried_state(
            of_block.unsqueeze(dim), end.unsqueeze(dim), P_x, dim,
            matrix=matrix, reverse=reverse, seq_idx=seq_idx, shape=shape,
        )  # fmt: skip
        states = own_states + product.of(kept, entering.movedim(dim, 0))
        return (states.flip(0) if reverse else states).movedim(0, dim).to(dtype)


@checked()
def carried_state(
    a: torch.Tensor,
    h: torch.Tensor,
    P_x: CartesianPartition,
    dim: int = 1,
    *,
    matrix: bool = False,
    reverse: bool = False,
    seq_idx: torch.Tensor | None = None,
    shape: ShapeMode = "static",
) -> torch.Tensor:
    """Return the state in which this worker's block of a recurrence starts.

    Collective over the workers along axis ``dim`` of ``P_x``. For kernels that scan one block from
    a given state, and return the state at its end.

    Args:
        a: product of the factors of this worker's block, extent 1 in ``dim``; ones or the unit
            matrix if the block is empty. Unused if the block contains several documents.
        h: state at the end of this worker's block if it starts from zero, extent 1 in ``dim``.
        P_x, dim, matrix, reverse, seq_idx, shape: see :func:`affine_scan`.

    Returns:
        New tensor of the shape of ``h``: the state that enters this worker's block. Zero on the
        first worker and, with ``seq_idx``, if the block starts with a new document. A clone of
        ``h`` on workers outside ``P_x``.

    Adjoint:
        Gradients of states travel to the preceding workers, which add them.

    Cost:
        One message to each following worker, all in flight together: the bytes of ``a`` and ``h``,
        and 24 bytes per sequence with ``seq_idx``, however long the blocks are.

    Raises:
        PartitionError, ShapeError: see :func:`affine_scan`.
    """
    dim = _dim_of("carried_state", a, h, seq_idx, P_x, dim, matrix, is_block=False)
    if not P_x.active:
        return h.clone()
    product, count = MATRICES if matrix else CELLS, P_x.shape[dim]
    slots = [a, h]
    if seq_idx is not None:
        a = torch.where(
            _where_documents_start(seq_idx, h, dim, reverse).any(dim, keepdim=True), 0, a
        )
        slots = [a, h, _end_documents(seq_idx, h, dim, reverse)]
    line = cached_operator(CartesianPartition.along, P_x, ((dim,),))
    moved = move(*_to_followers(line, dim, reverse, shape, slots))
    factors, states, *documents = [
        list(x.tensor_split(count, dim))[:: -1 if reverse else 1] for x in moved
    ]
    # Slots beyond the first worker are zeros, and so is the state that they carry.
    state, last = torch.zeros_like(h), None
    for i, (factor, end) in enumerate(zip(factors, states, strict=True)):
        if documents:
            first, final, has_cells = documents[0][i].split(1, dim)
            if last is not None:
                state = torch.where((first == last) | (has_cells == 0), state, 0)
            last = final if last is None else torch.where(has_cells == 1, final, last)
        if i < count - 1:
            state = product.of(factor, state) + end
    return state


def _to_followers(
    line: CartesianPartition,
    dim: int,
    reverse: bool,
    shape: ShapeMode,
    slots: list[torch.Tensor],
) -> tuple[list[Movement], list[torch.Tensor]]:
    """Return movements of each worker's slot to all workers that come after it."""
    movements: list[Movement] = []
    for x in slots:
        cells = x.shape[dim] * (line.shape[dim] - 1)
        widths = ((0, 0),) * dim + (((0, cells) if reverse else (cells, 0)),)
        halo = widths + ((0, 0),) * (line.dim - dim - 1)
        options = None, halo, False, 0.0, False, None, shape
        operator = cached_operator(HaloExchange, line, options)
        movements.append(operator.movement(x))
    return movements, slots


def _sequence_first(x: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    x = x.movedim(dim, 0)
    return x.flip(0) if reverse else x


def _with_dims_of(seq_idx: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * like.dim()
    shape[0], shape[dim] = seq_idx.shape
    return seq_idx.view(shape)


def _where_documents_start(
    seq_idx: torch.Tensor, like: torch.Tensor, dim: int, reverse: bool
) -> torch.Tensor:
    starts = torch.zeros_like(seq_idx, dtype=torch.bool)
    own_starts = starts[:, :-1] if reverse else starts[:, 1:]
    own_starts.copy_(seq_idx[:, 1:] != seq_idx[:, :-1])
    return _with_dims_of(starts, like, dim)


def _end_documents(
    seq_idx: torch.Tensor, like: torch.Tensor, dim: int, reverse: bool
) -> torch.Tensor:
    # The first and the last document in the order of the scan, and whether there is one.
    if not seq_idx.shape[1]:
        return _with_dims_of(seq_idx.new_zeros(len(seq_idx), 3, dtype=torch.int64), like, dim)
    ends = (seq_idx[:, -1], seq_idx[:, 0]) if reverse else (seq_idx[:, 0], seq_idx[:, -1])
    return _with_dims_of(torch.stack([*ends, torch.ones_like(ends[0])], 1).long(), like, dim)


def _dim_of(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    seq_idx: torch.Tensor | None,
    P_x: CartesianPartition,
    dim: int,
    matrix: bool,
    is_block: bool = True,
) -> int:
    """Return ``dim`` counted from the first, or raise on all ranks."""
    count = P_x.dim - 2 if matrix else P_x.dim
    if not -P_x.dim <= dim < P_x.dim or dim % P_x.dim >= count:
        raise ShapeError(
            f"{name}: dim is {dim}; it must be one of the {count} dims "
            + ("in front of the matrices" if matrix else "of the terms")
        )
    dim %= P_x.dim
    if matrix and P_x.shape[-2] > 1:
        raise PartitionError(
            f"{name}: P_x has shape {list(P_x.shape)}, but axis {P_x.dim - 2} must be 1: a matrix "
            "multiplies all rows of a state"
        )
    problem = _problem(a, b, seq_idx, P_x, dim, matrix, is_block) if P_x.active else None
    if problem is not None:
        shapes = [list(a.shape), list(b.shape)]
        refuse(P_x, ShapeError(f"{name}: {problem}; a and the block have shapes {shapes}"))
    return dim


def _problem(
    a: torch.Tensor,
    b: torch.Tensor,
    seq_idx: torch.Tensor | None,
    P_x: CartesianPartition,
    dim: int,
    matrix: bool,
    is_block: bool,
) -> str | None:
    if a.dim() != P_x.dim or b.dim() != P_x.dim:
        return f"P_x has {P_x.dim} axes; pass tensors with one dim per axis"
    if not all(x.is_floating_point() or x.is_complex() for x in (a, b)):
        return f"dtypes are {a.dtype} and {b.dtype}; pass floating-point or complex tensors"
    if matrix and a.shape[-2:] != (b.shape[-2],) * 2:
        return f"matrices must be [{b.shape[-2]}, {b.shape[-2]}]"
    leading = P_x.dim - 2 if matrix else P_x.dim
    for d in range(leading):
        if a.shape[d] not in (1, b.shape[d]) or (d == dim and not is_block and b.shape[d] != 1):
            return f"dim {d} must have extent 1 in a, or that of the block"
    if seq_idx is None:
        return None
    if dim == 0:
        return "seq_idx needs a batch dim in front of the sequence"
    if seq_idx.dim() != 2 or len(seq_idx) != len(b) or seq_idx.dtype.is_floating_point:
        return f"seq_idx must be an integer tensor [{len(b)}, T], but is {list(seq_idx.shape)}"
    if is_block and seq_idx.shape[1] != b.shape[dim]:
        return f"seq_idx must have {b.shape[dim]} cells, but has {seq_idx.shape[1]}"
    return None
