"""Warn when workers hold different copies of a tensor, of which a checkpoint keeps one."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence

import torch

from gpudist.checks.bits import digests_of, has_bits
from gpudist.convert.converted import Converted, conversion_of
from gpudist.convert.copies import NamedCopy, copies_in
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.nn.parameters.replication import holders_of
from gpudist.world.partition import Partition
from gpudist.world.texts import gather_texts_on_first


def warn_of_differences(
    where: str, module: torch.nn.Module, names: Collection[str], P_world: Partition
) -> None:
    """Warn on rank 0 if the copies of a parameter or buffer differ in any bit. Collective.

    Args:
        where: what the warning concerns.
        module: tree of layers. Copies are the tensors of converted networks, and those of layers
            with ``replicate_parameters=True``.
        names: names of the tensors to compare.
        P_world: partition of all workers.
    """
    if P_world.size == 1:
        return
    held = [(copy, ranks) for copy, ranks in _copies_with_holders(module) if copy.name in names]
    counts = {count for (count,) in P_world.allgather_data([len(held)])}
    if counts == {0} or len(counts) > 1:
        return
    mine = P_world.rank or 0
    digests = digests_of([copy.tensor for copy, ranks in held if mine in ranks])
    numbers = iter(digests)
    rows = P_world.allgather_data([next(numbers) if mine in ranks else 0 for _, ranks in held])
    different = [
        f"{copy.text} of rank {mine} differs from that of rank {ranks[0]}"
        for i, (copy, ranks) in enumerate(held)
        if mine in ranks and rows[mine][i] != rows[ranks[0]][i]
    ]
    text = f"{different[0]}; {len(different)} of {len(digests)} tensors do" if different else ""
    texts = [text for text in gather_texts_on_first(P_world, text.encode()) if text]
    if texts:
        warnings.warn(
            f"{where}: {texts[0].decode()}, and the checkpoint keeps one copy of each. Start with "
            "the same weights on every worker, as by distribute(..., broadcast_parameters=True), "
            "or load this checkpoint on all of them",
            UserWarning,
            stacklevel=4,
        )


def _copies_with_holders(module: torch.nn.Module) -> Iterator[tuple[NamedCopy, Sequence[int]]]:
    """Yield the copies, each with the world ranks that hold the same cells as this rank."""
    for path, part in module.named_modules():
        if issubclass(type(part), Converted):
            conversion = conversion_of(part)
            for name, tensor in copies_in(part, conversion.local_buffers):
                full = f"{path}.{name}" if path else name
                yield NamedCopy(full, tensor), conversion.P_x.ranks
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, placement in placements(module).items():
        if name in tensors and placement.is_replicated and has_bits(tensors[name]):
            holders = holders_of(placement)
            yield NamedCopy(name, tensors[name]), () if holders is None else holders.ranks
