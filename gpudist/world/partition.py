"""Partitions: lists of workers, with or without a Cartesian topology.

Creating a partition never communicates and may be done in any order on any rank. A worker outside a
partition still knows its members and shape, so that every rank can plan.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from gpudist.cache import cache_of
from gpudist.checks.arguments import checked
from gpudist.checks.digest import digest_of
from gpudist.checks.hints import MissingName
from gpudist.errors import PartitionError
from gpudist.geometry.cartesian import index_of, integers, rank_of
from gpudist.transport.base import Communicator, ReduceOp, Signature, Transport
from gpudist.transport.failure.channel import Failure
from gpudist.world.mesh import mesh_of
from gpudist.world.shared_numbers import numbers_of, reduce_rows, words_of

Number = TypeVar("Number", int, float)
_Result = TypeVar("_Result")


class Partition:
    """Ordered list of workers; on workers outside the list, the partition is inactive.

    Two partitions are equal if they have the same members in the same order and the same shape.

    Args:
        wire: this rank's end of the transport that carries messages between the workers.
        ranks: world rank of each member.
        shape: shape of the process grid, by default ``(len(ranks),)``.

    Attributes:
        ranks: world rank of each member; a member's position is its ``rank`` in the partition.
        shape: ``(size,)``, or the shape of the process grid.
        dim: number of axes.
        rank: this worker's position in the partition, ``None`` if it is not a member.
        active: whether this worker is a member.
        index: this worker's index on the process grid, ``None`` if it is not a member.
        transport: name of the transport that carries the messages, such as ``"nccl"``.
    """

    # What other rooms read, and dir() does not list: dir() and the reference are for users.
    _internal = frozenset({"check_axes", "communicator", "digest", "plan_rank", "wire"})

    def __init__(
        self, wire: Transport, ranks: Sequence[int], shape: Sequence[int] | None = None
    ) -> None:
        # An attribute, not a property: every call of an operator reads it.
        self.wire = self._wire = wire
        self.ranks = tuple(ranks)
        self.shape: tuple[int, ...] = tuple(shape) if shape is not None else (len(self.ranks),)
        # These are not cached properties, which take a lock that torch.compile cannot trace.
        rank = wire.rank
        self.rank = self.ranks.index(rank) if rank in self.ranks else None
        self.active = self.rank is not None
        self.index = None if self.rank is None else index_of(self.rank, self.shape)

    @property
    def dim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    if not TYPE_CHECKING:  # Otherwise type checkers accept any attribute.

        def __getattr__(self, name: str) -> NoReturn:
            raise MissingName("gpudist", name, type(self).__name__)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._internal]

    @property
    def plan_rank(self) -> int:
        # Plans hold integers only.
        return self.rank if self.rank is not None else -1

    @property
    def device(self) -> torch.device:
        """Device of the tensors that this partition moves."""
        return self._wire.device

    @property
    def transport(self) -> str:
        """Name of the transport that carries this partition's messages, see ``TRANSPORTS``."""
        return self._wire.name

    @cached_property
    def communicator(self) -> Communicator:
        # Created at first use.
        self._require_active("communicator")
        return self._wire.communicator(self.ranks)

    @cached_property
    def world(self) -> Partition:
        """Partition of all workers of the world."""
        return Partition(self._wire, range(self._wire.size))

    @cached_property
    def _identity(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.ranks, self.shape

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    @cached_property
    def digest(self) -> bytes:
        # Of 16 bytes, equal if and only if partitions are equal, also between ranks.
        return digest_of(repr(self._identity).encode())

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Partition)
            and self._wire is other._wire
            and self._identity == other._identity
        )

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        # Copies of layers share partitions, which are immutable; the world owns their
        # communicators.
        return self

    def __copy__(self) -> Partition:
        return self

    def __reduce__(self) -> NoReturn:
        raise PartitionError(
            f"{self!r} belongs to this process and cannot be pickled, nor can a module that holds "
            "partitions. To save a model, use model.state_dict(), or gpudist.checkpoint.save for "
            "the whole training; gpudist.sequential(model) returns a model without partitions. "
            "To pass a partition to another process, send its ranks and shape"
        )

    def __repr__(self) -> str:
        ranks = list(self.ranks) if self.size <= 8 else f"[{self.ranks[0]}, ..., {self.ranks[-1]}]"
        where = f"rank {self.rank}" if self.active else "inactive"
        return f"{type(self).__name__}(shape={list(self.shape)}, world ranks {ranks}, {where})"

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {world_rank: rank for rank, world_rank in enumerate(self.ranks)}

    def rank_of(self, world_rank: int) -> int:
        """Return the position in this partition of the worker with rank ``world_rank``.

        Raises:
            PartitionError: no member has this world rank.
        """
        try:
            return self._positions[world_rank]
        except (KeyError, TypeError):
            raise PartitionError(
                f"rank_of: world_rank is {world_rank!r:.80}; it takes the world rank of a member "
                f"of {self!r}"
            ) from None

    def create_partition_inclusive(self, ranks: Sequence[int]) -> Partition:
        """Return a partition of the members at positions ``ranks``, in this order.

        Raises:
            PartitionError: a rank is repeated, is not an integer, or is outside
                ``0 .. size - 1``.
        """
        ranks = list(integers(ranks, "ranks"))
        size = self.size
        outside = sorted({rank for rank in ranks if not 0 <= rank < size})
        if outside:
            raise PartitionError(
                f"ranks {outside} are not in a partition of {self.size} workers (0 to "
                f"{self.size - 1})"
            )
        twice: list[int] = []
        if len(set(ranks)) < len(ranks):
            twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
        if twice:
            raise PartitionError(
                f"ranks {twice} are listed more than once in {ranks}; list each rank once"
            )
        if not ranks:
            raise PartitionError(
                "a partition needs at least one worker; the list of ranks is empty"
            )
        return Partition(self._wire, [self.ranks[rank] for rank in ranks])

    @checked(PartitionError)
    def create_partition_union(self, other: Partition) -> Partition:
        """Return a partition of these members, followed by the further members of ``other``.

        Raises:
            PartitionError: the partitions belong to different worlds.
        """
        require_one_world("create_partition_union", self, other)
        return Partition(self._wire, tuple(dict.fromkeys(self.ranks + other.ranks)))

    def create_cartesian_topology_partition(self, shape: Sequence[int]) -> CartesianPartition:
        """Return all members on a process grid of ``shape``; DistDL's name for :meth:`grid`.

        Raises:
            PartitionError: ``prod(shape)`` is not ``size``.
        """
        shape = integers(shape, "the shape of a process grid")
        if prod(shape) != self.size or any(extent < 1 for extent in shape):
            raise PartitionError(
                f"a process grid of shape {list(shape)} holds {prod(shape)} workers but the "
                f"partition has {self.size}; {self._how_to_fit(shape)}"
            )
        return CartesianPartition(self._wire, self.ranks, shape)

    def grid(self, *shape: int | Sequence[int]) -> CartesianPartition:
        """Return the first workers on a process grid: ``P_world.grid(1, 1, 2, 2)`` has four.

        A worker's rank is row-major in its index. Where other workers are wanted than the first,
        select them by :meth:`create_partition_inclusive` before.

        Args:
            shape: number of workers along each axis, or one sequence of them.

        Returns:
            Partition of the first ``prod(shape)`` workers, of shape ``shape``.

        Raises:
            PartitionError: there are too few workers, or an extent is below 1.
        """
        numbers: Any = shape[0] if len(shape) == 1 and hasattr(shape[0], "__len__") else shape
        extents = integers(numbers, "the shape of a process grid")
        wanted = prod(extents)
        if not 1 <= wanted <= self.size or any(extent < 1 for extent in extents):
            raise PartitionError(
                f"a process grid of shape {list(extents)} holds {wanted} workers but the "
                f"partition has {self.size}; {self._how_to_fit(extents)}"
            )
        return CartesianPartition(self._wire, self.ranks[:wanted], extents)

    def _how_to_fit(self, shape: tuple[int, ...]) -> str:
        wanted, there = prod(shape), self._wire.size
        if any(extent < 1 for extent in shape):
            return "every axis has at least one"
        if wanted > there:
            return (
                f"start {wanted} processes, as by torchrun --nproc-per-node {wanted}, or use a "
                f"grid of {self.size} workers"
            )
        if wanted > self.size:
            return (
                f"select {wanted} of the {there} workers of the world with "
                f"create_partition_inclusive, or use a grid of {self.size} workers"
            )
        return "first select as many with create_partition_inclusive"

    def create_mesh_partition(self, mesh: DeviceMesh) -> CartesianPartition:
        """Return the members of a torch ``mesh`` on a process grid with one axis per mesh dim.

        Raises:
            PartitionError: the mesh repeats a rank, or has a rank outside this partition.
        """
        if not isinstance(getattr(mesh, "mesh", None), torch.Tensor):
            raise PartitionError(
                f"create_mesh_partition: mesh is {mesh!r:.80}; it takes a DeviceMesh of torch"
            )
        members = self.create_partition_inclusive([int(rank) for rank in mesh.mesh.flatten()])
        return members.create_cartesian_topology_partition(list(mesh.mesh.shape))

    def allgather_data(self, data: Sequence[Number]) -> list[list[Number]]:
        """Gather the numbers of every member, by rank. Collective over the members.

        Numbers are Python integers of at most 64 bits, or floats, and arrive exactly. If a list
        contains a float, all its numbers are converted to float.

        Args:
            data: numbers of this rank; the length must be equal on all ranks.

        Returns:
            One list of numbers per member.

        Raises:
            PartitionError: on every rank, if a rank passes anything else.
            PlanMismatch: on every rank, if ranks pass lists of different lengths.
        """
        return self._gather("allgather_data", "allgather_data", data)

    def broadcast_data(self, data: Sequence[Number] | None, root: int = 0) -> list[Number]:
        """Broadcast the numbers of rank ``root``. Collective over the members.

        Args:
            data: numbers to send, see :meth:`allgather_data`; ignored on ranks other than
                ``root``, which may pass ``None``.
            root: rank in this partition of the sender.

        Returns:
            The numbers of ``root``.

        Raises:
            PartitionError: on every rank, if ``data`` on the root is not a list of numbers.
        """
        self._require_active("broadcast_data")
        self._check_rank(root, "root")
        words = self._words("broadcast_data", data) if self.rank == root else []
        if self.device.type == "meta" and data is not None:
            # A dry run of a single rank on the meta device has no peers and no data.
            return list(data)
        count = torch.tensor([len(words)], device=self.device)
        signature = self._signature(f"broadcast_data(root={root})")
        with self._wire.group(signature):
            self.communicator.broadcast(count, root)
        (length,) = self._read(count)
        values = torch.zeros(length, dtype=torch.int64, device=self.device)
        if self.rank == root:
            values.copy_(torch.tensor(words, dtype=torch.int64))
        with self._wire.group(signature):
            self.communicator.broadcast(values, root)
        return numbers_of(self._read(values))

    def allreduce_data(self, data: Sequence[Number], op: ReduceOp = "sum") -> list[Number]:
        """Reduce the members' numbers element by element. Collective over the members.

        Results of integers are exact and of any size. If any rank passes floats, the results are
        floats, reduced in ascending rank order and therefore bitwise equal on all ranks.

        Args:
            data: numbers of this rank, see :meth:`allgather_data`.
            op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``.

        Returns:
            Reduced numbers, the same on all ranks.

        Raises:
            PartitionError: see :meth:`allgather_data`; also if a rank passes floats and another
                rank an integer that a float64 cannot represent.
            PlanMismatch: see :meth:`allgather_data`.
        """
        self._require_active("allreduce_data")
        if not (isinstance(op, str) and op in ("sum", "prod", "max", "min")):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PartitionError(f"allreduce_data: op is {op!r}; it must be sum, prod, max or min")
        rows = self._gather("allreduce_data", f"allreduce_data({op})", data)
        return reduce_rows("allreduce_data", rows, op)

    def check(self) -> None:
        """Raise the failure that has ended the world, if any.

        Waits for no other rank. Operators and captured steps ask by themselves; a program
        that replays CUDA graphs of its own, or works long between operators, may ask here.

        Raises:
            PeerFailure, CollectiveTimeout, PlanMismatch, TransportError: what operators would
                raise.
        """
        self._wire.look()

    def barrier(self) -> None:
        """Return when every member has called it."""
        self._require_active("barrier")
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        with self._wire.group(self._signature("barrier")):
            self.communicator.all_reduce(token, torch.empty_like(token))
        self._wire.wait()

    def print_sequential(self, text: object) -> None:
        """Print ``text`` of every member, in rank order. Collective over the members."""
        self._require_active("print_sequential")
        for rank in range(self.size):
            if rank == self.rank:
                print(f"rank {rank}: {text}")
                sys.stdout.flush()
            self.barrier()

    def _gather(self, name: str, label: str, data: object) -> list[list[Any]]:
        self._require_active(name)
        words = self._words(name, data)
        if self.size == 1:
            return [numbers_of(words)]
        mine = torch.tensor(words, dtype=torch.int64, device=self.device)
        output = torch.empty((self.size, len(mine)), dtype=torch.int64, device=self.device)
        with self._wire.group(self._signature(label)):
            self.communicator.all_gather(mine, output)
        return [numbers_of(row) for row in self._read(output)]

    def _words(self, name: str, data: object) -> list[int]:
        try:
            return words_of(f"{name}, rank {self.rank} of {self!r}", data)
        except PartitionError as error:
            # Only this rank knows of the error; the others are waiting for its message.
            self._wire.refuse(error)

    def _read(self, tensor: torch.Tensor) -> Any:
        self._wire.wait()
        return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _signature(self, name: str) -> Signature:
        return Signature.of(f"{name} on {list(self.shape)}", self.digest)

    def _require_active(self, what: str) -> None:
        if not self.active:
            raise PartitionError(
                f"{what}: this worker is not a member of {self!r}; call it on members only"
            )

    def _check_rank(self, rank: int, name: str = "rank") -> None:
        (number,) = integers([rank], name)
        if not 0 <= number < self.size:
            raise PartitionError(f"{name} {rank} is not one of 0 to {self.size - 1} of {self!r}")


class CartesianPartition(Partition):
    """Workers on a Cartesian process grid; ``rank`` is row-major in ``index``.

    Args:
        wire, ranks, shape: see :class:`Partition`.
    """

    def cartesian_index(self, rank: int) -> tuple[int, ...]:
        """Return the index of member ``rank`` on the process grid."""
        self._check_rank(rank)
        return index_of(rank, self.shape)

    def neighbor_ranks(self, rank: int) -> list[tuple[int | None, int | None]]:
        """Return the left and right neighbor of ``rank`` per axis; ``None`` beyond the edge."""
        index = self.cartesian_index(rank)
        pairs: list[tuple[int | None, int | None]] = []
        for axis, extent in enumerate(self.shape):
            left, right = (
                rank_of((*index[:axis], i, *index[axis + 1 :]), self.shape)
                if 0 <= i < extent
                else None
                for i in (index[axis] - 1, index[axis] + 1)
            )
            pairs.append((left, right))
        return pairs

    @checked(PartitionError)
    def create_cartesian_subtopology_partition(self, remain: Sequence[bool]) -> CartesianPartition:
        """Return the workers whose index differs from this one's only along the kept axes.

        An inactive worker gets the sub-grid of rank 0, as an inactive partition.

        Args:
            remain: whether to keep each axis; the others are removed.

        Returns:
            Partition with one axis per kept axis.

        Raises:
            PartitionError: ``remain`` does not have one entry per axis.
        """
        if len(remain) != self.dim:
            raise PartitionError(
                f"remain has {len(remain)} entries but the partition has {self.dim} axes"
            )
        axes = [axis for axis, keep in enumerate(remain) if keep]
        return CartesianPartition(
            self._wire, self.along(axes).ranks, [self.shape[axis] for axis in axes]
        )

    @checked(PartitionError)
    def along(self, axes: Sequence[int]) -> CartesianPartition:
        """Return the workers whose index differs from this one's only along ``axes``.

        The other axes remain, with extent 1. An inactive worker gets the workers along ``axes``
        through rank 0, as an inactive partition.

        Raises:
            PartitionError: an axis is out of range or repeated.
        """
        axes = self.check_axes(axes)
        index = self.index or (0,) * self.dim
        shape = [extent if axis in axes else 1 for axis, extent in enumerate(self.shape)]
        positions = [rank_of([0 if a in axes else i for a, i in enumerate(index)], self.shape)]
        for axis in axes:
            step = prod(self.shape[axis + 1 :])
            positions = [p + i * step for p in positions for i in range(self.shape[axis])]
        ranks = [self.ranks[position] for position in positions]
        return CartesianPartition(self._wire, ranks, shape)

    create_allreduction_partition = along

    @checked(PartitionError)
    def create_device_mesh(
        self, axes: Sequence[int], names: Sequence[str] | None = None
    ) -> DeviceMesh | None:
        """Return a torch mesh of the workers whose index differs from this one's along ``axes``.

        The mesh has its own torch process groups, for torch's data parallelism. Collective over
        torch's default process group, which the user initializes first; its ranks must be those of
        this world.

        Args:
            axes: axes of this partition, one per mesh dim.
            names: names of the mesh dims; required if there are several.

        Returns:
            Mesh, or ``None`` on workers outside the partition.

        Raises:
            PartitionError: on every rank alike, if an axis is out of range, names are missing,
                world ranks are not in ascending order along an axis, or torch's default process
                group is missing or has other ranks.
        """
        ascending = self.check_axes(axes)
        counted = [axis % self.dim for axis in axes]
        if len(names or axes) != len(axes) or (names is None and len(axes) != 1):
            raise PartitionError(f"create_device_mesh: axes {counted} need a name each")
        lines = [self._lines(axis) for axis in counted]
        for axis, line in (
            (a, line) for a, some in zip(counted, lines, strict=True) for line in some
        ):
            if line != sorted(line):
                raise PartitionError(
                    f"create_device_mesh: along axis {axis} of {self!r} the world ranks {line} are "
                    "not ascending, as they are in every process group of torch"
                )
        grid = None
        if self.active:
            grid = torch.tensor(self.along(counted).ranks).view([self.shape[a] for a in ascending])
            grid = grid.permute([ascending.index(axis) for axis in counted]).contiguous()
        return mesh_of(lines, grid, self._wire, names)

    def _lines(self, axis: int) -> list[list[int]]:
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, world_rank in enumerate(self.ranks):
            index = index_of(rank, self.shape)
            lines.setdefault((*index[:axis], *index[axis + 1 :]), []).append(world_rank)
        return list(lines.values())

    @checked(PartitionError)
    def check_axes(self, axes: Sequence[int]) -> tuple[int, ...]:
        # Returns them in ascending order, with negative axes counted from the end.
        wrong = [axis for axis in axes if not -self.dim <= axis < self.dim]
        if wrong:
            raise PartitionError(
                f"axes {wrong} are out of range for a partition with {self.dim} axes "
                f"(-{self.dim} to {self.dim - 1})"
            )
        counted = sorted(axis % self.dim for axis in axes)
        if len(set(counted)) != len(counted):
            raise PartitionError(
                f"axes {list(axes)} name an axis more than once; list each axis once"
            )
        return tuple(counted)


def require_one_world(where: str, *partitions: Partition) -> None:
    """Raise if partitions belong to different worlds, whose messages would never match.

    Raises:
        PartitionError: also on the other ranks of both worlds, which may not notice the error
            themselves.
    """
    first, *others = partitions
    for other in others:
        if other.wire is first.wire:
            continue
        error = PartitionError(
            f"{where}: {first!r} and {other!r} belong to two worlds (over {first.transport} and "
            f"over {other.transport}); create both from one P_world"
        )
        for wire in (first.wire, other.wire):
            if wire.size > 1:
                wire.abort(Failure.from_exception(error, wire.rank))
        raise error


def cache_in_world(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Cache the results of a function of a partition and hashable arguments, until the world ends.

    Arguments are positional, and the partition is the first.
    """

    @wraps(function)
    def call(P: Partition, *args: object) -> _Result:
        results = cache_of(P.wire.remembered, function, 4096)
        return results.get_or_make((P, *args), lambda: function(P, *args))

    return call
