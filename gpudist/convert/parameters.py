"""Parameters of a converted network: who holds them, and which tensors replace them in a call."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from gpudist.convert.edits import SplitWeight
from gpudist.errors import ConversionError
from gpudist.exchange import all_reduce
from gpudist.nn.parameters.parameter_broadcast import ParameterBroadcast, copies_of_owned
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, set_placements
from gpudist.nn.parameters.replication import copies_of, holders_of
from gpudist.nn.partitions import plane
from gpudist.sbp.copies import Alias, leaves_of
from gpudist.sbp.unknown import stand_in
from gpudist.world.partition import CartesianPartition, Partition


class Parameters:
    """Parameters of a network: full on every worker, on the first one only, or split.

    Args:
        P_x: partition of the network's workers.
        split_weights: layers whose weights are split.

    Attributes:
        holders: workers over which gradients of full parameters are summed; ``None`` if there is
            only this one.
        aliases: tensors outside the network that its parameters and buffers stand for.
        unlisted: tensors that require grad and that only attributes of the network's modules hold.
    """

    def __init__(self, P_x: CartesianPartition, split_weights: Sequence[SplitWeight] = ()) -> None:
        self.P_x = P_x
        self.split_weights = list(split_weights)
        self.holders: Partition | None = None
        if P_x.active and P_x.size > 1:
            self.holders = P_x.world.create_partition_inclusive(sorted(P_x.ranks))
        self._sharded: WeakSet[nn.Module] = WeakSet()
        self._broadcasts: dict[int, ParameterBroadcast] = {}
        # Global shapes of parameters, on ranks that take no part in the network.
        self._shapes: dict[int, torch.Size] = {}
        self._owned: list[nn.Parameter] = []
        self.aliases: dict[int, Alias] = {}
        self.unlisted: list[torch.Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameters:
        # Modules are copied before they are converted.
        made = Parameters(self.P_x, copy.deepcopy(self.split_weights, memo))
        for parameter in self._owned:
            own = copy.deepcopy(parameter, memo)
            made._owned.append(own)
            if id(parameter) in self._broadcasts:
                made._broadcasts[id(own)] = self._broadcasts[id(parameter)]
            if id(parameter) in self._shapes:
                made._shapes[id(own)] = self._shapes[id(parameter)]
        made.unlisted = copy.deepcopy(self.unlisted, memo)
        for alias in self.aliases.copy().values():
            own = copy.deepcopy(alias.own, memo)
            for tensor in (alias.tensor(), alias.own):
                if tensor is not None:
                    made.follow(tensor, own, alias.name)
        return made

    def follow(self, tensor: torch.Tensor, own: torch.Tensor | None, name: str) -> None:
        """Let ``own`` stand for ``tensor``, which closures may keep, since they are not copied."""
        key, aliases = id(tensor), self.aliases
        aliases[key] = Alias(ref(tensor, lambda _: aliases.pop(key, None)), own, name)

    def follow_network(self, source: nn.Module, made: nn.Module) -> None:
        """Let the parameters and buffers of ``made``, a copy, stand for those of ``source``.

        Attributes of ``source`` that are computed from parameters have no copy: they are refused
        where the forward uses them.
        """
        self.unlisted = list(unlisted(made).values())
        theirs = [*_listed(source), *unlisted(source).items()]
        own = [*(x for _, x in _listed(made)), *self.unlisted]
        for (name, x), stands_for in zip(theirs, own, strict=True):
            self.follow(x, stands_for, name)
        listed = {id(p) for p in source.parameters()}
        modules = zip(source.named_modules(), made.modules(), strict=True)
        for (path, module), other in modules:
            for name, x in vars(module).items():
                is_computed = isinstance(x, torch.Tensor) and not x.is_leaf
                if is_computed and any(id(leaf) in listed for leaf in leaves_of(x)):
                    self.follow(vars(other)[name], None, f"{path}.{name}" if path else name)

    def keep_on_first(self, network: nn.Module) -> None:
        """Keep the parameters on the first worker only; other workers hold empty tensors."""
        first = plane(self.P_x, ())
        cut = {id(p) for weight in self.split_weights for p in weight.layer.parameters()}
        owned: dict[int, ParameterPlacement] = {}
        for path, module in network.named_modules():
            placed: dict[str, ParameterPlacement] = {}
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in cut:
                    continue
                if id(parameter) not in owned:
                    used = ParameterPlacement.on(self.P_x, parameter.shape)
                    owned[id(parameter)] = used
                    if not self.P_x.active:
                        self._shapes[id(parameter)] = parameter.shape
                    if not first.active:
                        # The parameter itself, which the network may also keep in a dict.
                        parameter.data = parameter.data.new_empty(0)
                    self._note(parameter, f"{path}.{name}", used)
                placed[name] = owned[id(parameter)].first_copies
            if placed:
                set_placements(module, placed)

    def _note(self, parameter: nn.Parameter, name: str, used: ParameterPlacement) -> None:
        broadcast = ParameterBroadcast.between(name, used.first_copies, used, self.P_x)
        if broadcast is not None:
            self._broadcasts[id(parameter)] = broadcast
        self._owned.append(parameter)

    def sharded(self, network: nn.Module) -> set[int]:
        """Return the identities of FSDP2's parameters, and register sums of their gradients.

        Each parameter is full on the workers of one network, and sharded over other axes.
        """
        found: set[int] = set()
        kind: Any = _if_imported("torch.distributed.fsdp", "FSDPModule")
        if kind is None:
            return found
        shards: list[Any] = [module for module in network.modules() if isinstance(module, kind)]
        for module in shards:
            found.update(id(p) for p in module.parameters())
            if module not in self._sharded:
                self._sharded.add(module)
                if self._owned or self.split_weights:
                    raise ConversionError(
                        "fully_shard needs converted networks that hold their full parameters on "
                        "every worker; do not use replicate_parameters=False or "
                        "Plan.split_weight with it"
                    )
                if self.holders is not None:
                    module.set_all_reduce_hook(partial(_sum_in_place, self.holders))
        return found

    def substitutes(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that replace the parameters in a call, and sum their gradients."""
        blocks = {
            id(own): (weight, name)
            for weight in self.split_weights
            for name, own in weight.layer.named_parameters(recurse=False)
        }
        dtensor = _if_imported("torch.distributed.tensor", "DTensor")
        if dtensor is not None and any(isinstance(p, dtensor) for p in parameters):
            raise ConversionError(
                "a parameter of a converted network is a DTensor that fully_shard did not make, "
                "so its gradient would not be summed over the network's workers; shard the "
                "network with torch.distributed.fsdp.fully_shard, or wrap it in "
                "DistributedDataParallel"
            )
        broadcasts = [self._broadcasts.get(id(p)) for p in parameters]
        holders: list[Partition | None] = []
        for parameter, broadcast in zip(parameters, broadcasts, strict=True):
            cut = blocks.get(id(parameter))
            if cut is not None:
                holders.append(holders_of(cut[0].placed[cut[1]]))
            else:
                learns = torch.is_grad_enabled() and parameter.requires_grad
                holders.append(self.holders if learns and broadcast is None else None)
        copies: list[Any] = copies_of_owned(list(parameters), broadcasts)
        copies = copies_of(copies, holders)
        for i, parameter in enumerate(parameters):
            if id(parameter) in blocks:
                weight, name = blocks[id(parameter)]
                copies[i] = weight.as_global(name, copies[i])
            elif id(parameter) in self._shapes:
                copies[i] = stand_in(copies[i], self._shapes[id(parameter)])
        return copies


def _listed(network: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *network.named_parameters(remove_duplicate=False),
        *network.named_buffers(remove_duplicate=False),
    ]


def unlisted(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return leaves that require grad, by name, that the network's modules keep but do not list.

    Searches attributes, lists, tuples, dicts, and modules in these.
    """
    known = {id(x) for x in [*(x for _, x in _listed(network)), *network.modules()]}
    found: dict[str, torch.Tensor] = {}
    places = [
        (f"{path}.{name}" if path else name, x)
        for path, module in network.named_modules()
        for name, x in vars(module).items()
    ]
    for name, x in places:
        is_leaf = isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad
        if id(x) in known or not (is_leaf or isinstance(x, (list, tuple, dict, nn.Module))):
            continue
        known.add(id(x))
        if isinstance(x, torch.Tensor):
            found[name] = x
        elif isinstance(x, nn.Module):
            places += [(f"{name}.{key}", part) for key, part in vars(x).items()]
        else:
            parts: Any = x.items() if isinstance(x, dict) else enumerate(x)
            places += [(f"{name}[{key!r}]", part) for key, part in parts]
    return found


def _if_imported(room: str, name: str) -> Any:
    # Importing the module takes a second; if it is not imported, its class has no instances.
    return getattr(sys.modules.get(room), name, None)


def _sum_in_place(holders: Partition, gradients: torch.Tensor) -> None:
    gradients.copy_(all_reduce(gradients, holders))
