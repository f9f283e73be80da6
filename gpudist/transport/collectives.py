"""Collective verbs implemented with sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gpudist.errors import ShapeError, TransportError
from gpudist.transport.base import Communicator, ReduceOp, Signature

if TYPE_CHECKING:
    from gpudist.transport.point_to_point import PointToPointTransport

# Below this size, an all-reduce is bound by latency, and reduce plus broadcast is faster than 2
# (size - 1) messages per rank.
_SMALL_BYTES = 16 * 1024

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
_IDENTITY = {"sum": 0, "prod": 1}


class PointToPointCommunicator(Communicator):
    """Verbs over a transport that only has point-to-point messages.

    Reductions are in ascending rank order for every size. float16 and bfloat16 are reduced in
    float32 and rounded once. The result is bitwise equal on every rank and in every run.

    Raises (every verb):
        TransportError: a rank outside the communicator, a message to itself, an unknown reduction.
        ShapeError: a tensor that is not contiguous, on another device or of the wrong shape, or the
            maximum or minimum of complex numbers.
    """

    def __init__(self, wire: PointToPointTransport, members: Sequence[int]) -> None:
        super().__init__(members, wire.rank)
        self._wire = wire

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._message(True, tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._message(False, tensor, peer)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._check_rank(root)
        payload = self._bytes(tensor)
        self._collective(f"broadcast from {root}", tensor, lambda: self._broadcast(payload, root))

    def reduce(
        self,
        tensor: torch.Tensor | None,
        output: torch.Tensor | None,
        root: int,
        op: ReduceOp = "sum",
    ) -> None:
        self._check_rank(root)
        shown = tensor if tensor is not None else output
        if shown is None or (output is None) == (self.rank == root):
            raise TransportError(
                f"reduce to rank {root}: the root gives an output, every other rank only a tensor; "
                f"rank {self.rank} gave tensor {_shape(tensor)} and output {_shape(output)}"
            )
        self._check_op(op, shown)
        if tensor is not None and output is not None:
            self._check_shape("reduce", tensor, output, output.shape)
        if tensor is None and self.size == 1 and op not in _IDENTITY:
            raise TransportError(
                f"reduce: the {op} of no contributions is undefined; pass a tensor on a rank"
            )
        self._collective(
            f"{op} reduce to {root}", shown, lambda: self._reduce(tensor, output, root, op)
        )

    def all_reduce(self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp = "sum") -> None:
        self._check_op(op, tensor)
        self._check_shape("all_reduce", tensor, output, tensor.shape)
        self._collective(f"{op} all_reduce", tensor, lambda: self._all_reduce(tensor, output, op))

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        self._check_shape("all_gather", tensor, output, (self.size, *tensor.shape))

        def run() -> None:
            output[self.rank].copy_(tensor)
            self._share(output.unbind(0))

        self._collective("all_gather", tensor, run)

    def reduce_scatter(
        self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp = "sum"
    ) -> None:
        self._check_op(op, tensor)
        self._check_shape("reduce_scatter", output, tensor, (self.size, *output.shape))
        pieces = tensor.detach().unbind(0)
        self._collective(
            f"{op} reduce_scatter", tensor, lambda: self._combine_pieces(pieces, output, op)
        )

    def _broadcast(self, payload: torch.Tensor, root: int) -> None:
        """Broadcast along a binomial tree: place p receives from p without its lowest bit."""
        place = (self.rank - root) % self.size
        step = 1
        while step < self.size and not place & step:
            step *= 2
        if place:
            self._wire.exchange(recvs=[(payload, self._at(place - step + root))])
        children = []
        while step > 1:
            step //= 2
            if place + step < self.size:
                children.append((payload, self._at(place + step + root)))
        self._wire.exchange(sends=children)

    def _reduce(
        self, tensor: torch.Tensor | None, output: torch.Tensor | None, root: int, op: ReduceOp
    ) -> None:
        if output is None:
            assert tensor is not None
            self._wire.exchange(sends=[(self._bytes(tensor), self._at(root))])
            return
        parts = [tensor if i == root else torch.empty_like(output) for i in range(self.size)]
        self._wire.exchange(
            recvs=[
                (self._bytes(part), self._at(i))
                for i, part in enumerate(parts)
                if i != root and part is not None
            ]
        )
        combine([part for part in parts if part is not None], output, op)

    def _all_reduce(self, tensor: torch.Tensor, output: torch.Tensor, op: ReduceOp) -> None:
        if tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
            self._reduce(tensor, output if self.rank == 0 else None, 0, op)
            self._broadcast(self._bytes(output), 0)
            return
        pieces = output.view(-1).tensor_split(self.size)
        self._combine_pieces(tensor.view(-1).tensor_split(self.size), pieces[self.rank], op)
        self._share(pieces)

    def _combine_pieces(
        self, pieces: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp
    ) -> None:
        mine = pieces[self.rank]
        parts = [mine if i == self.rank else torch.empty_like(mine) for i in range(self.size)]
        self._wire.exchange(sends=self._to_others(pieces), recvs=self._to_others(parts))
        combine(parts, output, op)

    def _share(self, pieces: Sequence[torch.Tensor]) -> None:
        mine = [pieces[self.rank]] * self.size
        self._wire.exchange(sends=self._to_others(mine), recvs=self._to_others(pieces))

    def _to_others(self, pieces: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        return [
            (self._bytes(piece), self.members[i])
            for i, piece in enumerate(pieces)
            if i != self.rank
        ]

    def _message(self, sends: bool, tensor: torch.Tensor, peer: int) -> None:
        payload, other = self._bytes(tensor), self._peer(peer)
        words = f"{'send to' if sends else 'recv from'} rank {other}:"
        with self._group("message", tensor, words):
            self._wire.queue_message(sends, payload, other)

    def _at(self, place: int) -> int:
        return self.members[place % self.size]

    def _collective(self, verb: str, tensor: torch.Tensor, run: Callable[[], None]) -> None:
        with self._group(verb, tensor, verb):
            self._wire.queue(self.members, torch.no_grad()(run))

    @contextmanager
    def _group(self, verb: str, tensor: torch.Tensor, words: str) -> Generator[None, None, None]:
        """Use the open group, or open one with a signature of this verb and its size."""
        if self._wire.in_group:
            yield
            return
        meaning = f"{verb} of {tensor.numel() * tensor.element_size()} bytes over {self.size}"
        label = f"{words} {_shape(tensor)} on {self.members}"
        with self._wire.group(Signature(label, Signature.of(meaning).digest)):
            yield

    def _peer(self, rank: int) -> int:
        self._check_rank(rank)
        if rank == self.rank:
            raise TransportError(
                f"rank {rank} cannot send to or receive from itself; copy the tensor instead"
            )
        return self.members[rank]

    def _check_shape(
        self, verb: str, small: torch.Tensor, large: torch.Tensor, shape: Sequence[int]
    ) -> None:
        for tensor in (small, large):
            self._check_memory(tensor)
        if tuple(large.shape) != tuple(shape) or small.dtype != large.dtype:
            raise ShapeError(
                f"{verb} over {self.size} ranks: {_shape(small)} on one side needs {tuple(shape)} "
                f"of the same dtype on the other, not {_shape(large)}"
            )

    def _bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check_memory(tensor)
        return tensor.detach().view(-1).view(torch.uint8)

    def _check_memory(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._wire.device.type:
            raise ShapeError(
                f"the {self._wire.name} transport carries tensors on "
                f"{self._wire.device}, not {_shape(tensor)} on {tensor.device}"
            )
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ShapeError(
                f"{_shape(tensor)} with strides {tensor.stride()} is not plain contiguous memory; "
                f"call .contiguous(), or .resolve_conj() on a conjugated view"
            )


def combine(parts: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
    """Reduce ``parts`` from left to right into ``output``, which may share memory with them."""
    if not parts:
        output.fill_(_IDENTITY[op])
        return
    narrow = output.dtype in (torch.float16, torch.bfloat16)
    total = parts[0].to(torch.float32 if narrow else output.dtype, copy=True)
    for part in parts[1:]:
        _COMBINE[op](total, part, out=total)
    output.copy_(total)


def _shape(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
