"""Gradient sums for the parameters of modules that are not distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from gpudist.cache import Cache
from gpudist.errors import ConventionError
from gpudist.nn.parameters.gradient_graph import Convention, Made, Node
from gpudist.nn.parameters.uses import Ranks, UsedParameters, tensors_of
from gpudist.nn.tensor_parallel.region import TensorRegion
from gpudist.ops.shape_agreement import refuse
from gpudist.world.partition import CartesianPartition, Partition

_NAME = "fuse_parameter_movements"


class _GradientSums(NamedTuple):
    """Gradient sums for the outputs of the node that copies parameters.

    Attributes:
        holders: workers over which to sum each gradient; ``None`` if there is only this one.
        unknown: error message for a gradient that arrives unexpectedly.
    """

    holders: dict[int, Partition | None]
    unknown: dict[int, str]


class PlainSums:
    """Gradient sums of plain modules, derived from the graph of each forward.

    Args:
        P: all workers with these modules.
        convention: convention of values for which the graph shows none.
    """

    def __init__(self, P: Partition, convention: Convention | None) -> None:
        self._P, self._convention = P, convention
        self._known = Cache[tuple[object, ...], _GradientSums](64)

    def follows(self, network: torch.nn.Module, copies_node: Node) -> bool:
        """Return whether the graph shows how the parameters copied by ``copies_node`` are used.

        Raises:
            ConventionError: the graph does not show it, and ``network`` has layers of the invariant
                convention.
        """
        if hasattr(copies_node, "replicated"):
            return True
        # The node was created under torch.compile or a dispatch mode.
        if any(region.is_invariant for region in _regions_of(network)):
            raise ConventionError(
                f"{_NAME}: under torch.compile or a dispatch mode, such as that of "
                "torch.utils.flop_counter, it is unknown over which workers to sum the gradients "
                "of modules between layers of the invariant convention; apply it to parts of the "
                "network"
            )
        return False

    def set_holders(
        self,
        network: torch.nn.Module,
        outputs: object,
        made: Sequence[Made],
        copies_node: Node,
        parameters: Mapping[int, torch.nn.Parameter],
    ) -> None:
        """Set the workers over which the copying node sums the gradients of plain modules.

        Args:
            network: network whose forward has ended.
            outputs: return value of the forward.
            made: operators of the forward that declare a convention.
            copies_node: node that made the copies.
            parameters: parameters of plain modules, by output number.
        """
        tensors = tensors_of(outputs)
        used = UsedParameters(tensors, copies_node)
        key = used.structure
        if key not in self._known:
            names = {p: name for name, p in network.named_parameters()}
            names = {number: names[p] for number, p in parameters.items()}
            try:
                sums = self._find_sums(network, used, names)
            except ConventionError as error:
                refuse(self._P, error)
            self._known[key] = sums
        sums = self._known[key]
        copies_node.unknown = sums.unknown
        copies_node.replicated = tuple(
            parameter._replace(holders=sums.holders.get(i, parameter.holders))
            for i, parameter in enumerate(copies_node.replicated)
        )

    def _find_sums(
        self, network: torch.nn.Module, used: UsedParameters, names: Mapping[int, str]
    ) -> _GradientSums:
        ranks = {number: frozenset(self._P.ranks) for number in names}
        unknown: dict[int, str] = {}
        regions = _regions_of(network)
        declared = [b for b in used.borders if b.takes != b.gives and len(b.ranks) > 1]
        lines = {_line_of(region) for region in regions} | {border.ranks for border in declared}
        reached: set[int] = set()
        for line in sorted(lines, key=sorted):
            is_declared = any(border.concerns(line) for border in declared)
            is_declared |= any(r.is_invariant and len(_line_of(r) & line) > 1 for r in regions)
            otherwise = self._convention if is_declared else "dual"
            uses = used.conventions(line)
            reached |= set(uses)
            for number, name in names.items():
                kinds = {kind or otherwise for kind in uses.get(number, {None})}
                if len(kinds) > 1 and None not in kinds:
                    raise ConventionError(_text(name, "is used by both conventions", line))
                if None in kinds:
                    unknown[number] = _text_of_unknown(name, line)
                    if number in uses:
                        raise ConventionError(unknown[number])
                elif kinds == {"invariant"}:
                    ranks[number] &= self._at_the_same_place(line, regions)
                elif number in uses and not line <= ranks[number]:
                    text = _text(name, "has a part of its gradient on each", line)
                    raise ConventionError(
                        f"{text}, but P has the ranks {sorted(self._P.ranks)}; pass a P with all "
                        "of them"
                    )
        if not lines:
            reached = set(used.conventions(frozenset()))
        if used.hides_recomputation and set(names) - reached:
            name = names[min(set(names) - reached)]
            raise ConventionError(
                f"{_NAME}: {name} may be used in a part of the network that is recomputed by a "
                "reentrant checkpoint, where its gradient is not summed; pass use_reentrant=False"
            )
        world = self._P.world
        holders = {
            number: world.create_partition_inclusive(sorted(members)) if len(members) > 1 else None
            for number, members in ranks.items()
            if number not in unknown
        }
        return _GradientSums(holders, unknown)

    def _at_the_same_place(self, line: Ranks, regions: list[TensorRegion]) -> Ranks:
        """Return the workers that have this one's position in the lines parallel to ``line``."""
        if frozenset(self._P.ranks) <= line:
            return frozenset({self._P.world.rank or 0})
        grids = [region.P for region in regions]
        if isinstance(self._P, CartesianPartition):
            grids.append(self._P)
        for grid in grids:
            for axis in range(grid.dim):
                others = [other for other in range(grid.dim) if other != axis]
                if frozenset(grid.along([axis]).ranks) == line and set(self._P.ranks) <= set(
                    grid.ranks
                ):
                    return frozenset(grid.along(others).ranks)
        raise ConventionError(
            f"{_NAME}: the {len(line)} workers {sorted(line)} of an invariant operator are not an "
            f"axis of {self._P!r}; pass a P with an axis for them"
        )


def _regions_of(network: torch.nn.Module) -> list[TensorRegion]:
    candidates = [getattr(module, "region", None) for module in network.modules()]
    regions = [region for region in candidates if isinstance(region, TensorRegion)]
    return [region for region in regions if region.P.active and region.size > 1]


def _line_of(region: TensorRegion) -> Ranks:
    return frozenset(region.line.ranks)


def _text(name: str, what: str, line: Ranks) -> str:
    return f"{_NAME}: parameter {name} {what} of workers {sorted(line)}"


def _text_of_unknown(name: str, line: Ranks) -> str:
    return (
        f"{_NAME}: it is unknown whether parameter {name} has its whole gradient or a part of it "
        f"on each of workers {sorted(line)}: it is not used between tensor-parallel layers, or "
        "reaches the loss by another way than tensors in lists, tuples and dicts that the "
        "network returns; pass convention='invariant' (whole tensors) or 'dual' (blocks)"
    )
