"""Verbs of NCCL on tensors, queued until their group ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from gpudist.errors import ShapeError, TransportError
from gpudist.transport.base import Communicator, ReduceOp
from gpudist.transport.collectives import combine
from gpudist.transport.flight_recorder import Post

if TYPE_CHECKING:
    from gpudist.transport.nccl.transport import NcclTransport

Kind = Literal[
    "send", "receive", "broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter"
]

# Dtypes that NCCL reduces directly. Complex numbers are summed as pairs of real ones; narrower
# integers and booleans are converted.
REDUCED = {
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_WIDENED = (torch.bool, torch.int16, torch.uint16)


@dataclass(frozen=True)
class NcclCall:
    """One call of NCCL.

    Attributes:
        kind: name of the verb.
        members: world ranks of the communicator; ``None`` for the world communicator, which
            carries messages.
        peer: rank of the other side or of the root in the communicator.
        count: number of items of ``dtype``, as NCCL counts them for this kind.
        dtype: dtype of the items, in NCCL's terms.
        op: reduction; ignored by verbs that do not reduce.
        source, target: tensors to read and to write, kept alive until the group has ended; ``None``
            if the verb does not use them.
        after: called when the group has been queued.
    """

    kind: Kind
    members: tuple[int, ...] | None
    peer: int
    count: int
    dtype: str
    op: ReduceOp
    source: torch.Tensor | None
    target: torch.Tensor | None
    after: Callable[[], object] | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that one side contributes."""
        return _nbytes(self.source if self.source is not None else self.target)

    def post(self, rank: int) -> Post:
        """Return the entry of this call in the flight recorder of ``rank``."""
        if self.members is None:
            sent, received = _nbytes(self.source), _nbytes(self.target)
            return Post(self.kind, self.peer, sent, received)
        root = self.members[self.peer]
        is_broadcast, is_root = self.kind == "broadcast", root == rank
        sent = 0 if is_broadcast and not is_root else _nbytes(self.source)
        received = 0 if is_broadcast and is_root else _nbytes(self.target)
        return Post(self.kind, root, sent, received)


class NcclCommunicator(Communicator):
    """Verbs over one list of members.

    Reductions use NCCL's order, which for one size is the same in every run, and its precision for
    16-bit floats. If the transport adds in rank order, the tensors are gathered and then reduced,
    with bitwise the same results as over every other transport. Memory and bytes are then
    multiplied by the number of members.

    Raises (every verb):
        TransportError: a rank outside the communicator, a message to itself, an unknown reduction.
        ShapeError: a tensor that is not contiguous, on another device or of the wrong shape, or the
            maximum or minimum of complex numbers.
    """

    def __init__(self, wire: NcclTransport, members: Sequence[int]) -> None:
        super().__init__(members, wire.rank)
        self._wire = wire

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._message("send", tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._message("receive", tensor, peer)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._check(tensor)
        self._check_rank(root)
        cells = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        self._post("broadcast", root, cells.numel(), "uint8", "sum", cells, cells)

    def reduce(
        self,
        tensor: torch.Tensor | None,
        output: torch.Tensor | None,
        root: int,
        op: ReduceOp = "sum",
    ) -> None:
        self._check_rank(root)
        is_root = self.rank == root
        if is_root != (output is not None) or (tensor is None and not is_root):
            raise TransportError(
                f"reduce to rank {root}: the root gives an output, every other rank only a tensor"
            )
        shown = tensor if tensor is not None else output
        assert shown is not None
        self._check_op(op, shown)
        mine = tensor if tensor is not None else _neutral(shown, op)
        self._check(mine)
        if output is not None:
            self._check(output, mine)
        self._reduction("reduce", root, mine, output, op)

    def all_reduce(self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp = "sum") -> None:
        self._check_op(op, tensor)
        self._check(tensor)
        self._check(output, tensor)
        self._reduction("all_reduce", 0, tensor, output, op)

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        self._check(tensor)
        self._check(output)
        if output.shape != (self.size, *tensor.shape) or output.dtype != tensor.dtype:
            raise ShapeError(
                f"all_gather: the output has shape {list(output.shape)} of {output.dtype}; it must "
                f"be {[self.size, *tensor.shape]} of {tensor.dtype}"
            )
        mine = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        self._post("all_gather", 0, mine.numel(), "uint8", "sum", mine, output)

    def reduce_scatter(
        self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp = "sum"
    ) -> None:
        self._check_op(op, tensor)
        self._check(tensor)
        self._check(output)
        if tensor.shape != (self.size, *output.shape) or output.dtype != tensor.dtype:
            raise ShapeError(
                f"reduce_scatter: the input has shape {list(tensor.shape)} of {tensor.dtype}; it "
                f"must be {[self.size, *output.shape]} of {output.dtype}"
            )
        self._reduction("reduce_scatter", 0, tensor, output, op)

    def _message(self, kind: Kind, tensor: torch.Tensor, peer: int) -> None:
        self._check(tensor)
        self._check_rank(peer)
        if peer == self.rank:
            raise TransportError(
                f"rank {peer} cannot send to or receive from itself; copy the tensor instead"
            )
        cells = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        source, target = (cells, None) if kind == "send" else (None, cells)
        self._wire.post(
            NcclCall(kind, None, self.members[peer], cells.numel(), "uint8", "sum", source, target)
        )

    def _reduction(
        self,
        kind: Kind,
        root: int,
        tensor: torch.Tensor,
        output: torch.Tensor | None,
        op: ReduceOp,
    ) -> None:
        if tensor.is_complex() and op != "sum":
            raise TransportError(f"{kind}: complex numbers support sum over NCCL, not {op}")
        if tensor.dtype not in (*REDUCED, *REAL_OF, *_WIDENED):
            raise TransportError(
                f"{kind}: NCCL does not reduce {tensor.dtype}; convert the tensor to one of "
                f"{', '.join(map(str, (*REDUCED, *REAL_OF)))}"
            )
        if self._wire.in_rank_order:
            self._gather_and_combine(kind, tensor, output, op)
            return
        if tensor.dtype in REAL_OF:
            tensor = torch.view_as_real(tensor)
            output = torch.view_as_real(output) if output is not None else None
        after = None
        if tensor.dtype not in REDUCED:
            final, wide = output, torch.int32
            tensor = tensor.to(wide)
            if final is not None:
                output = converted = torch.empty(final.shape, dtype=wide, device=final.device)
                after = partial(final.copy_, converted)
        count = tensor.numel() // (self.size if kind == "reduce_scatter" else 1)
        self._post(kind, root, count, REDUCED[tensor.dtype], op, tensor, output, after)

    def _gather_and_combine(
        self, kind: Kind, tensor: torch.Tensor, output: torch.Tensor | None, op: ReduceOp
    ) -> None:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        parts = gathered[:, self.rank] if kind == "reduce_scatter" else gathered
        after = partial(combine, parts.unbind(0), output, op) if output is not None else None
        mine = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        self._post("all_gather", 0, mine.numel(), "uint8", "sum", mine, gathered, after)

    def _post(
        self,
        kind: Kind,
        peer: int,
        count: int,
        dtype: str,
        op: ReduceOp,
        source: torch.Tensor,
        target: torch.Tensor | None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._wire.post(NcclCall(kind, self.members, peer, count, dtype, op, source, target, after))

    def _check(self, tensor: torch.Tensor, like: torch.Tensor | None = None) -> None:
        if tensor.device != self._wire.device or not tensor.is_contiguous():
            raise ShapeError(
                f"NCCL's verbs take contiguous tensors on {self._wire.device}; this one is on "
                f"{tensor.device}" + ("" if tensor.is_contiguous() else " and not contiguous")
            )
        if like is not None and (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ShapeError(
                f"the output is {tensor.dtype} of shape {list(tensor.shape)}, the input "
                f"{like.dtype} of shape {list(like.shape)}"
            )


def _nbytes(tensor: torch.Tensor | None) -> int:
    return tensor.numel() * tensor.element_size() if tensor is not None else 0


def run_alone(call: NcclCall) -> None:
    """Run a collective with a single member, which is a copy."""
    source, target = call.source, call.target
    if source is not None and target is not None and target is not source and target.numel():
        target.view(-1).view(source.dtype).copy_(source.view(-1))


def _neutral(output: torch.Tensor, op: ReduceOp) -> Any:
    """Return a tensor of neutral elements of ``op``."""
    if op in ("sum", "prod"):
        return torch.full_like(output, 0 if op == "sum" else 1)
    if output.dtype == torch.bool:
        return torch.full_like(output, op == "min")
    limits = torch.finfo if output.dtype.is_floating_point else torch.iinfo
    lowest, highest = limits(output.dtype).min, limits(output.dtype).max
    return torch.full_like(output, lowest if op == "max" else highest)
