"""Copies of parameters and buffers: compare their bits between workers, and broadcast them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from gpudist.checks.bits import bytes_of, digests_of, has_bits
from gpudist.checks.digest import digest_of
from gpudist.errors import ConversionError
from gpudist.nn.parameters.parameter_broadcast import ParameterBroadcast, copies_of_owned
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, placements
from gpudist.world.partition import CartesianPartition, Partition
from gpudist.world.texts import gathered

# Integers that each rank contributes to the comparison.
Row = Sequence[Any]


class Copy(NamedTuple):
    """A parameter or buffer of which every worker holds a copy."""

    name: str
    tensor: torch.Tensor

    @property
    def text(self) -> str:
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{kind} {self.name!r} ({dtype} {list(self.tensor.shape)})"


def copies_in(network: nn.Module, excepted: Collection[str] = ()) -> Iterator[Copy]:
    """Yield the parameters and buffers of which every worker is meant to hold a copy.

    These are all but split ones, those with one owner, shards of FSDP2 and those without values,
    each under its first name.

    Args:
        network: converted network, or one to be converted.
        excepted: names of buffers that may differ.
    """
    placed, found = placements(network), set[int]()
    for path, module in network.named_modules():
        beyond = getattr(module, "beyond_sequential", ())
        for last, x in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{last}" if path else last
            if x is None or id(x) in found or name in placed or name in excepted or last in beyond:
                continue
            found.add(id(x))
            if has_bits(x):
                yield Copy(name, x)


class Comparison:
    """Comparison of the copies that the workers of ``P_x`` hold.

    Ranks compare one number each. If the numbers differ, they exchange one per tensor.

    Args:
        P_x: partition of the workers that hold the copies.
        copies: the copies; on other workers, the tensors in their place.
    """

    def __init__(self, P_x: Partition, copies: Sequence[Copy]) -> None:
        self.P_x = P_x
        is_member = P_x.active and P_x.size > 1
        tensors = [copy.tensor for copy in copies] if is_member else []
        self._facts = [
            (copy.text, number)
            for copy, number in zip(copies if is_member else (), digests_of(tensors), strict=True)
        ]
        number = int.from_bytes(digest_of(json.dumps(self._facts).encode())[:7], "little")
        group = int.from_bytes(P_x.digest[:7], "little")
        self.row: Row = (group, int(is_member), number)

    def difference(self, rows: Sequence[Row]) -> str:
        """Return which copy differs first, or an empty text. Collective over the world if any does.

        The text is the same on all ranks.

        Args:
            rows: ``row`` of every rank of the world.
        """
        alike: dict[int, set[int]] = {}
        for group, is_member, number in rows:
            if is_member:
                alike.setdefault(group, set()).add(number)
        different = [group for group, numbers in alike.items() if len(numbers) > 1]
        if not different:
            return ""
        # Every rank sees all rows, so that all take part, whichever workers differ.
        texts = gathered(self.P_x.world, json.dumps(self._facts).encode())
        members = [r for r, row in enumerate(rows) if row[1] and row[0] == different[0]]
        return _difference({rank: json.loads(texts[rank]) for rank in members})


def _difference(facts: Mapping[int, list[list[Any]]]) -> str:
    """Return which tensor differs first between ranks, given the text and digest of each."""
    places = [dict(zip(facts, found, strict=True)) for found in zip_longest(*facts.values())]
    root = min(facts)
    others = [
        {rank: fact for rank, fact in place.items() if fact != place[root]} for place in places
    ]
    i, other = next((i, min(ranks)) for i, ranks in enumerate(others) if ranks)
    theirs, mine = ((places[i][rank] or ["no tensor"])[0] for rank in (other, root))
    what = f"{theirs} of rank {other} differs from that of rank {root}"
    if theirs != mine:
        what = f"rank {other} has {theirs}, but rank {root} has {mine}"
    count = sum(map(bool, others))
    return (
        f"{what}; {count} of {len(places)} tensors differ, on ranks {sorted(set().union(*others))}"
    )


def remedy_of(difference: str) -> str:
    """Return what to do about a difference before the first call."""
    return (
        "Start with the same values on every worker: use one seed, load one file, or pass "
        "distribute(..., broadcast_parameters=True), which sends those of the first worker"
        + ("; if a buffer may differ, name it in local_buffers" if "buffer" in difference else "")
    )


def broadcast_copies(
    network: nn.Module, P_x: CartesianPartition, excepted: Collection[str]
) -> None:
    """Set the copies on all workers of ``P_x`` to those of its first worker. Collective over it.

    Raises:
        PlanMismatch: on every rank, if the workers hold tensors of different sizes.
    """
    copies = [copy.tensor for copy in copies_in(network, excepted) if copy.tensor.numel()]
    if not P_x.active or P_x.size == 1 or not copies:
        return
    parts = [bytes_of(x) for x in copies]
    ways = [ParameterPlacement.on(P_x, part.shape) for part in parts]
    broadcasts = [
        ParameterBroadcast.between(str(i), used.first_copies, used, P_x)
        for i, used in enumerate(ways)
    ]
    if P_x.rank != 0:
        parts = [part[:0] for part in parts]
    with torch.no_grad():
        found = copies_of_owned(parts, broadcasts)
        for x, part in zip(copies, found, strict=True):
            x.detach().copy_(part.view(x.dtype).view(x.shape))


def require_buffers(network: nn.Module, names: Collection[str]) -> None:
    """Raise if a name is not that of a buffer.

    Raises:
        ConversionError: the message lists the buffers.
    """
    buffers = [name for name, _ in network.named_buffers(remove_duplicate=False)]
    unknown = [name for name in names if name not in buffers]
    if unknown:
        raise ConversionError(
            f"distribute: local_buffers names {unknown}, but the buffers of the network are "
            f"{buffers}"
        )
