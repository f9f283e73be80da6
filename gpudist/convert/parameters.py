"""Parameters of a converted network: who holds them, and which tensors replace them in a call."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import nn

from gpudist.convert.blocks_in_state_dict import keep_blocks
from gpudist.convert.edits import SplitWeight
from gpudist.errors import ConversionError
from gpudist.exchange import all_reduce
from gpudist.nn.parameters.parameter_broadcast import ParameterBroadcast, copies_of_owned
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.parameters.replication import copies_of
from gpudist.sbp.global_parameter import GlobalParameter, block_of, exchange, obstacle
from gpudist.sbp.unknown import stand_in
from gpudist.world.partition import CartesianPartition, Partition


class Exchange(NamedTuple):
    """A full parameter that becomes a global one.

    Attributes:
        module: module that lists it.
        parameter: the parameter, once for each module and name.
        placed: workers that are to hold its cells.
        broadcast: broadcast of its cells at each call, if any.
    """

    module: nn.Module
    parameter: torch.Tensor
    placed: ParameterPlacement
    broadcast: ParameterBroadcast | None


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
        unlisted: tensors that require grad and that only attributes of the network's modules hold.
        has_global: whether parameters are global ones.
    """

    def __init__(self, P_x: CartesianPartition, split_weights: Sequence[SplitWeight] = ()) -> None:
        self.P_x = P_x
        self.split_weights = list(split_weights)
        self.holders: Partition | None = None
        if P_x.active and P_x.size > 1:
            self.holders = P_x.world.create_partition_inclusive(sorted(P_x.ranks))
        self._sharded: WeakSet[nn.Module] = WeakSet()
        self.unlisted: list[torch.Tensor] = []
        self.has_global = False
        # Whether parameters of other libraries have been refused.
        self._are_known = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameters:
        parameters = Parameters(self.P_x, copy.deepcopy(self.split_weights, memo))
        parameters.unlisted = copy.deepcopy(self.unlisted, memo)
        parameters.has_global = self.has_global
        return parameters

    def exchanges(
        self, network: nn.Module, weights: Sequence[SplitWeight], is_replicated: bool
    ) -> list[Exchange]:
        """Return what makes the parameters global ones, without a change of the network.

        A full parameter that cannot become a global one stays as it is.

        Args:
            network: network whose parameters are full.
            weights: layers whose weights are split.
            is_replicated: whether every worker holds the others; if not, only the first one does.

        Raises:
            ConversionError: a parameter cannot be held in parts; the message names the first one.
        """
        split = {id(weight.layer): weight.placed for weight in weights}
        own = {
            id(weak)
            for module in network.modules()
            if isinstance(module, nn.RNNBase)
            for weak in module._flat_weight_refs
        }
        exchanges: list[Exchange] = []
        for path, module in network.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                full, problem = f"{path}.{name}" if path else name, obstacle(parameter, own)
                used = ParameterPlacement.on(self.P_x, parameter.shape)
                placed = used if is_replicated or not parameter.dim() else used.first_copies
                broadcast = ParameterBroadcast.between(full, placed, used, self.P_x)
                if id(module) in split:
                    placed, broadcast = split[id(module)][name], None
                if not problem:
                    exchanges.append(Exchange(module, parameter, placed, broadcast))
                elif placed.copies < self.P_x.size:
                    raise ConversionError(
                        f"distribute: the parameter {full!r}, of which each worker is to hold its "
                        f"part, {problem}"
                    )
        return exchanges

    def keep(self, network: nn.Module) -> None:
        """Keep the tensors that the network does not list, and let hooks see gradients alone."""
        self.unlisted = list(unlisted_leaves(network).values())
        for parameter in (*network.parameters(), *self.unlisted):
            if not isinstance(parameter, GlobalParameter):
                hooks = parameter._backward_hooks or {}
                for number, hook in hooks.items():
                    hooks[number] = _only_with_gradient(hook)

    def make_global(self, weights: Sequence[SplitWeight], exchanges: Sequence[Exchange]) -> None:
        """Make parameters global ones, and let state dicts have their blocks."""
        self.split_weights, self.has_global = list(weights), True
        # A recurrent layer's weak references to its weights would prevent the exchange.
        recurrent: dict[nn.RNNBase, list[Any]] = {
            e.module: [weak and weak() for weak in e.module._flat_weight_refs]
            for e in exchanges
            if isinstance(e.module, nn.RNNBase)
        }
        for module in recurrent:
            module._flat_weight_refs = []
        for _, parameter, placed, broadcast in exchanges:
            if not isinstance(parameter, GlobalParameter):
                exchange(parameter, placed, self.P_x, broadcast)
        for module, weights_of_module in recurrent.items():
            module._flat_weight_refs = [None if x is None else ref(x) for x in weights_of_module]
        for module in dict.fromkeys(e.module for e in exchanges):
            keep_blocks(module)

    def identities_of_shards(self, modules: Sequence[nn.Module]) -> set[int]:
        """Return the identities of FSDP2's parameters, and register sums of their gradients.

        Each parameter is full on the workers of one network, and sharded over other axes.
        """
        identities: set[int] = set()
        kind = _sharding_class()
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
        is_plain = self.holders is None and self._are_known and not self.has_global
        return not is_plain or _sharding_class() is not None

    def substitutes(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that replace the parameters in a call, and sum their gradients."""
        dtensor = if_imported("torch.distributed.tensor", "DTensor")
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


def if_imported(room: str, name: str) -> Any:
    # Importing the module takes a second; if it is not imported, its class has no instances.
    return getattr(sys.modules.get(room), name, None)


def _sharding_class() -> Any:
    # Of modules that FSDP2 shards.
    kind = if_imported("torch.distributed.fsdp", "FSDPModule")
    return kind if kind is not None and kind.__subclasses__() else None


def _only_with_gradient(hook: Any) -> Any:
    # The node that sums the gradients of all parameters passes None for those that a call of the
    # network does not use.
    return lambda gradient: None if gradient is None else hook(gradient)


def _sum_in_place(holders: Partition, gradients: torch.Tensor) -> None:
    gradients.copy_(all_reduce(gradients, holders))
