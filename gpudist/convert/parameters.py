"""Parameters of a converted network: who holds them, and which tensors replace them in a call."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import nn

from gpudist.convert.blocks_in_state_dict import keep_blocks
from gpudist.convert.edits import SplitWeight
from gpudist.errors import ConversionError
from gpudist.exchange import all_reduce
from gpudist.nn.parameters.parameter_broadcast import ParameterBroadcast, copies_of_owned
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, set_placements
from gpudist.nn.parameters.replication import copies_of
from gpudist.sbp.copies import Alias, leaves_of
from gpudist.sbp.global_parameter import GlobalParameter, block_of, replacement
from gpudist.sbp.unknown import stand_in
from gpudist.world.partition import CartesianPartition, Partition


class Parameters:
    """Parameters of a network: full on every worker, on the first one only, or split.

    If some are not full, all are global parameters, so that functions of several parameters, such
    as the norm of their gradients, treat them alike.

    Args:
        P_x: partition of the network's workers.
        split_weights: layers whose weights are split.

    Attributes:
        holders: workers over which gradients of full parameters are summed; ``None`` if there is
            only this one.
        aliases: tensors that parameters and buffers of the network stand for.
        unlisted: tensors that require grad and that only attributes of the network's modules hold.
        replaced: parameters that global ones replace and that the network also keeps elsewhere,
            for example in a dict, with the global ones.
        has_global: whether parameters are global ones.
    """

    def __init__(self, P_x: CartesianPartition, split_weights: Sequence[SplitWeight] = ()) -> None:
        self.P_x = P_x
        self.split_weights = list(split_weights)
        self.holders: Partition | None = None
        if P_x.active and P_x.size > 1:
            self.holders = P_x.world.create_partition_inclusive(sorted(P_x.ranks))
        self.replaced: list[tuple[ReferenceType[nn.Parameter], Any]] = []
        self._sharded: WeakSet[nn.Module] = WeakSet()
        self.aliases: dict[int, Alias] = {}
        self.unlisted: list[torch.Tensor] = []
        self.has_global = False
        # Whether parameters of other libraries have been refused.
        self._are_known = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameters:
        # Modules are copied before they are converted.
        parameters = Parameters(self.P_x, copy.deepcopy(self.split_weights, memo))
        parameters.unlisted = copy.deepcopy(self.unlisted, memo)
        parameters.has_global = self.has_global
        for alias in self.aliases.copy().values():
            substitute = copy.deepcopy(alias.substitute, memo)
            for tensor in (alias.tensor(), alias.substitute):
                if tensor is not None:
                    parameters.follow(tensor, substitute, alias.name)
        parameters.replace(
            [
                (copy.deepcopy(old, memo), copy.deepcopy(new, memo))
                for old, new in self.kept_elsewhere()
            ]
        )
        return parameters

    def follow(self, tensor: torch.Tensor, substitute: torch.Tensor | None, name: str) -> None:
        """Let ``substitute`` stand for ``tensor``, which closures keep: they are not copied."""
        key, aliases = id(tensor), self.aliases
        aliases[key] = Alias(ref(tensor, lambda _: aliases.pop(key, None)), substitute, name)

    def follow_network(self, source: nn.Module, converted: nn.Module) -> None:
        """Let the parameters and buffers of ``converted``, a copy, stand for those of ``source``.

        Attributes of ``source`` that are computed from parameters have no copy: they are refused
        where the forward uses them.
        """
        self.unlisted = list(unlisted_leaves(converted).values())
        theirs = [*named_tensors(source), *unlisted_leaves(source).items()]
        tensors = [*(x for _, x in named_tensors(converted)), *self.unlisted]
        for (name, x), substitute in zip(theirs, tensors, strict=True):
            self.follow(x, substitute, name)
        parameters = {id(p) for p in source.parameters()}
        modules = zip(source.named_modules(), converted.modules(), strict=True)
        for (path, module), other in modules:
            for name, x in vars(module).items():
                is_computed = isinstance(x, torch.Tensor) and not x.is_leaf
                if is_computed and any(id(leaf) in parameters for leaf in leaves_of(x)):
                    self.follow(vars(other)[name], None, f"{path}.{name}" if path else name)

    def replace(self, pairs: Sequence[tuple[nn.Parameter, Any]]) -> None:
        """Let global parameters stand for the plain ones that they replace, and for their aliases.

        Args:
            pairs: plain and global parameters; the network may keep a plain one elsewhere too.
        """
        global_ones = {id(old): new for old, new in pairs if old is not new}
        for alias in self.aliases.copy().values():
            tensor, new = alias.tensor(), global_ones.get(id(alias.substitute))
            if tensor is not None and new is not None:
                self.follow(tensor, new, alias.name)
        for old, new in pairs:
            if old is not new:
                self.replaced.append((ref(old), new))
                self.follow(old, new, "")

    def kept_elsewhere(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the replaced parameters that still exist, with the global ones."""
        pairs = [(old, weak, new) for weak, new in self.replaced if (old := weak()) is not None]
        self.replaced = [(weak, new) for _, weak, new in pairs]
        return [(old, new) for old, _, new in pairs]

    def make_global(self, network: nn.Module, is_replicated: bool) -> None:
        """Make all parameters global ones.

        Args:
            network: network whose split weights are global already.
            is_replicated: whether every worker holds the others; if not, only the first one does.
        """
        self.has_global = True
        by_id: dict[int, GlobalParameter] = {}
        for path, module in network.named_modules():
            placed: dict[str, ParameterPlacement] = {}
            for name, parameter in module._parameters.items():
                if parameter is None or isinstance(parameter, GlobalParameter):
                    continue
                used = ParameterPlacement.on(self.P_x, parameter.shape)
                placement = used if is_replicated or not parameter.dim() else used.first_copies
                placed[name] = placement
                if id(parameter) not in by_id:
                    cells = parameter.detach()
                    cells = cells if placement.P.active else cells.new_empty(0)
                    new = replacement(parameter, cells, placement, self.P_x)
                    new.broadcast = ParameterBroadcast.between(
                        f"{path}.{name}", placement, used, self.P_x
                    )
                    by_id[id(parameter)] = new
                module._parameters[name] = by_id[id(parameter)]  # pyright: ignore
            if placed:
                set_placements(module, placed)
                keep_blocks(module)

    def identities_of_shards(self, modules: Sequence[nn.Module]) -> set[int]:
        """Return the identities of FSDP2's parameters, and register sums of their gradients.

        Each parameter is full on the workers of one network, and sharded over other axes.
        """
        identities: set[int] = set()
        kind: Any = _if_imported("torch.distributed.fsdp", "FSDPModule")
        if kind is None:
            return identities
        shards: list[Any] = [module for module in modules if isinstance(module, kind)]
        for module in shards:
            identities.update(id(p) for p in module.parameters())
            if module not in self._sharded:
                self._sharded.add(module)
                if any(isinstance(p, GlobalParameter) for p in module.parameters()):
                    raise ConversionError(
                        "fully_shard needs converted networks that hold their full parameters on "
                        "every worker; do not use replicate_parameters=False or "
                        "Plan.split_weight with it"
                    )
                if self.holders is not None:
                    module.set_all_reduce_hook(partial(_sum_in_place, self.holders))
        return identities

    def may_be_replaced(self) -> bool:
        """Return whether :meth:`substitutes` may return other tensors than the parameters.

        Otherwise one worker holds all parameters, which are plain.
        """
        kind: Any = _if_imported("torch.distributed.fsdp", "FSDPModule")
        is_sharded = kind is not None and bool(kind.__subclasses__())
        return self.holders is not None or self.has_global or is_sharded or not self._are_known

    def substitutes(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that replace the parameters in a call, and sum their gradients."""
        dtensor = _if_imported("torch.distributed.tensor", "DTensor")
        if dtensor is not None and any([isinstance(p, dtensor) for p in parameters]):
            raise ConversionError(
                "a parameter of a converted network is a DTensor that fully_shard did not make, "
                "so its gradient would not be summed over the network's workers; shard the "
                "network with torch.distributed.fsdp.fully_shard, or wrap it in "
                "DistributedDataParallel"
            )
        self._are_known = True
        broadcasts = [p.broadcast if isinstance(p, GlobalParameter) else None for p in parameters]
        holders = [
            p.holders if isinstance(p, GlobalParameter) else self.holders for p in parameters
        ]
        held = [block_of(p) if isinstance(p, GlobalParameter) else p for p in parameters]
        copies: list[Any] = copies_of_owned(held, broadcasts)
        copies = copies_of(copies, holders)
        blocks = {
            id(parameter_of_weight): (weight, name)
            for weight in self.split_weights
            for name, parameter_of_weight in weight.layer.named_parameters(recurse=False)
        }
        for i, parameter in enumerate(parameters):
            if id(parameter) in blocks:
                weight, name = blocks[id(parameter)]
                copies[i] = weight.as_global(name, copies[i])
            elif isinstance(parameter, GlobalParameter) and not self.P_x.active:
                copies[i] = stand_in(copies[i], parameter.shape)
        return copies


def named_tensors(network: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a network by name, shared ones under every name."""
    return [
        *network.named_parameters(remove_duplicate=False),
        *network.named_buffers(remove_duplicate=False),
    ]


def unlisted_leaves(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return leaves that require grad, by name, that the network's modules keep but do not list.

    Searches attributes, lists, tuples, dicts, and modules in these.
    """
    known = {id(x) for x in [*(x for _, x in named_tensors(network)), *network.modules()]}
    leaves: dict[str, torch.Tensor] = {}
    owners: list[tuple[str, Any]] = [*network.named_modules()]
    for path, owner in owners:
        is_module = isinstance(owner, nn.Module)
        parts: Any = vars(owner) if is_module else owner
        for key, x in parts.items() if isinstance(parts, dict) else enumerate(parts):
            is_leaf = isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad
            if id(x) in known or not (is_leaf or isinstance(x, (list, tuple, dict, nn.Module))):
                continue
            known.add(id(x))
            attribute = f"{path}.{key}" if path else str(key)
            name = attribute if is_module else f"{path}[{key!r}]"
            if isinstance(x, torch.Tensor):
                leaves[name] = x
            else:
                owners.append((name, x))
    return leaves


def _if_imported(room: str, name: str) -> Any:
    # Importing the module takes a second; if it is not imported, its class has no instances.
    return getattr(sys.modules.get(room), name, None)


def _sum_in_place(holders: Partition, gradients: torch.Tensor) -> None:
    gradients.copy_(all_reduce(gradients, holders))
