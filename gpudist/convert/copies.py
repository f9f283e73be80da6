"""Copies of parameters and buffers: compare their bits between workers, and broadcast them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import product, zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from gpudist.checks.bits import bytes_of, digests_of, has_bits
from gpudist.checks.digest import digest_of
from gpudist.errors import ConversionError, PlanMismatch
from gpudist.nn.parameters.buckets import messages
from gpudist.nn.parameters.parameter_broadcast import ParameterBroadcast, copies_of_owned
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, placements
from gpudist.world.partition import CartesianPartition, Partition
from gpudist.world.texts import gather_texts


class NamedCopy(NamedTuple):
    """A parameter or buffer of which every worker holds a copy."""

    name: str
    tensor: torch.Tensor

    @property
    def text(self) -> str:
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{kind} {self.name!r} ({dtype} {list(self.tensor.shape)})"


def copies_in(network: nn.Module, excepted: Collection[str] = ()) -> Iterator[NamedCopy]:
    """Yield the parameters and buffers of which every worker is meant to hold a copy.

    These are all but split ones, those with one owner, shards of FSDP2 and those without values,
    each under its first name, parameters first.

    Args:
        network: converted network, or one to be converted.
        excepted: names of buffers that may differ.
    """
    placed, seen = placements(network), set[int]()
    modules = list(network.named_modules())
    for kind, (path, module) in product(("_parameters", "_buffers"), modules):
        beyond = getattr(module, "beyond_sequential", ())
        for last, x in getattr(module, kind).items():
            name = f"{path}.{last}" if path else last
            if x is None or id(x) in seen or name in placed or name in excepted or last in beyond:
                continue
            seen.add(id(x))
            if has_bits(x):
                yield NamedCopy(name, x)


def require_equal_copies(
    network: nn.Module,
    P_x: Partition,
    excepted: Collection[str],
    number: int = 0,
    plan_text: str = "",
    with_values: bool = True,
    P_all: Partition | None = None,
) -> int:
    """Return the first rank's ``number`` if the workers of ``P_x`` hold equal copies.

    Collective over ``P_all``. Ranks compare one digest each. Only if the digests differ, they
    exchange one for each tensor.

    Args:
        network: converted network.
        P_x: partition of the workers that hold the copies.
        excepted: names of buffers that may differ.
        number: any number of at most 62 bits, sent along.
        plan_text: the plan's edits, which must be equal as well.
        with_values: whether to compare values too, instead of names, dtypes and shapes alone.
        P_all: ranks that call this, by default the world.

    Raises:
        PlanMismatch: on every rank, with the name of the first copy that differs.
    """
    is_member = P_x.active and P_x.size > 1
    copies = list(copies_in(network, excepted)) if is_member else []
    numbers = digests_of([copy.tensor for copy in copies]) if with_values else [0] * len(copies)
    facts = [(f"the plan {plan_text!r}" if plan_text else "no plan", 0)]
    facts += [(copy.text, digest) for copy, digest in zip(copies, numbers, strict=True)]
    mine = _number_of(digest_of(json.dumps(facts).encode()))
    row = [number, int(is_member), _number_of(P_x.digest), mine]
    P_all = P_all or P_x.world
    rows = P_all.allgather_data(row)
    alike: dict[Any, dict[int, Any]] = {}
    for rank, (_, takes_part, group, digest) in enumerate(rows):
        if takes_part:
            alike.setdefault(group, {})[rank] = digest
    different = [ranks for ranks in alike.values() if len(set(ranks.values())) > 1]
    if different:
        # Every rank sees all rows, so that all take part, whichever workers differ.
        texts = gather_texts(P_all, json.dumps([type(network).__name__, facts]).encode())
        raise _difference({rank: json.loads(texts[rank]) for rank in different[0]})
    return int(rows[0][0])


def _number_of(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "little")


def _difference(by_rank: Mapping[int, tuple[str, list[tuple[str, int]]]]) -> PlanMismatch:
    """Return the error for copies of which each rank has a text and a digest."""
    tables = [facts for _, facts in by_rank.values()]
    places = [dict(zip(by_rank, facts, strict=True)) for facts in zip_longest(*tables)]
    root = min(by_rank)
    others = [
        {rank: fact for rank, fact in place.items() if fact != place[root]} for place in places
    ]
    i, other = next((i, min(ranks)) for i, ranks in enumerate(others) if ranks)
    theirs, mine = ((places[i][rank] or ["no tensor"])[0] for rank in (other, root))
    if theirs != mine and i == 0:
        return PlanMismatch(
            f"{by_rank[root][0]}: rank {other} follows {theirs}, but rank {root} {mine}; pass "
            "equal plans on every worker"
        )
    if theirs != mine:
        return PlanMismatch(
            f"{by_rank[root][0]}: rank {other} has {theirs}, but rank {root} has {mine}; build the "
            "same network on every worker"
        )
    count, ranks = sum(map(bool, others)), sorted(set[int]().union(*others))
    remedy = "; if the buffer may differ, name it in local_buffers"
    return PlanMismatch(
        f"{by_rank[root][0]}: {mine} of rank {other} differs from that of rank {root}; {count} of "
        f"{len(places) - 1} tensors differ, on ranks {ranks}. Start with the same values on every "
        "worker: use one seed, load one file, or pass distribute(..., broadcast_parameters=True), "
        f"which sends those of the first worker{remedy if mine.startswith('buffer') else ''}"
    )


def broadcast_copies(
    network: nn.Module, P_x: CartesianPartition, excepted: Collection[str]
) -> None:
    """Set the copies on all workers of ``P_x`` to those of its first worker.

    Collective over the world.

    Raises:
        PlanMismatch: on every rank, if the workers hold tensors of other names, dtypes or shapes.
    """
    require_equal_copies(network, P_x, excepted, with_values=False)
    copies = [copy.tensor for copy in copies_in(network, excepted) if copy.tensor.numel()]
    if not P_x.active or P_x.size == 1 or not copies:
        return
    # One message after the other, so that a message is all that is in memory twice.
    for chosen in messages({i: x.nbytes for i, x in enumerate(copies)}):
        parts = [bytes_of(copies[i]) for i in chosen]
        ways = [ParameterPlacement.on(P_x, part.shape) for part in parts]
        broadcasts = [
            ParameterBroadcast.between(str(i), used.first_copies, used, P_x)
            for i, used in zip(chosen, ways, strict=True)
        ]
        if P_x.rank != 0:
            parts = [part[:0] for part in parts]
        with torch.no_grad():
            received = copies_of_owned(parts, broadcasts)
            for i, part in zip(chosen, received, strict=True):
                # A part of a bucket need not be aligned to the dtype.
                x = copies[i].detach()
                x.copy_(part.clone().view(x.dtype).view(x.shape))


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
