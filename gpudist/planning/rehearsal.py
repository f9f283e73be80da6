"""One rank's training step of a converted network, with plans and without cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gpudist.checks.arguments import Checked
from gpudist.convert.dry import converted_for, without_cells
from gpudist.convert.network import Converted
from gpudist.errors import GpudistError, ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.nn.distributed_module import DistributedModule
from gpudist.planning.clock import Clock, Kernels, Phase
from gpudist.planning.hardware import Profile
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.transport.dry import META, DryTransport
from gpudist.world.partition import Partition


@dataclass(frozen=True)
class Memory(Checked):
    """Bytes that a rank holds at the end of a forward, before its backward.

    Attributes:
        parameters: its own.
        optimizer: of what the optimizer remembers of them.
        activations: saved for backward, the input and ghosts included.
    """

    parameters: int
    optimizer: int
    activations: int

    @property
    def gradients(self) -> int:
        """As many as parameters."""
        return self.parameters

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Rehearsal(Checked):
    """What one rank of a partition does in a step."""

    rank: int
    forward: Phase
    backward: Phase
    memory: Memory

    @property
    def messages(self) -> int:
        """Sent in forward and backward."""
        return self.forward.messages + self.backward.messages

    @property
    def message_bytes(self) -> int:
        return self.forward.message_bytes + self.backward.message_bytes

    def seconds(self, overlapped: bool) -> float:
        """Of forward and backward."""
        phases = (self.forward, self.backward)
        return sum(p.overlapped_s if overlapped else p.serial_s for p in phases)


class Stage:
    """A network without cells, ready to be rehearsed on any partition.

    Args:
        network: of torch's modules; it is not changed, and its weights are not copied.
        global_shape: of its input.
        profile: of the machine.
        replicate_parameters: as of :func:`gpudist.distribute`.
        optimizer_slots: tensors that the optimizer keeps of each parameter, 2 of Adam.

    Raises:
        ShapeError: the network cannot be called with such an input, or is distributed already.

    Attributes:
        sequential: what a forward of the whole network computes on one rank.
        layers: of every call of a layer, how many cells beyond its own an output reads at most, and
            the global shape of the input.
    """

    def __init__(
        self,
        network: nn.Module,
        global_shape: Sequence[int],
        profile: Profile,
        replicate_parameters: bool = True,
        optimizer_slots: int = 2,
    ) -> None:
        _require_sequential(network)
        self.network = without_cells(network)
        self.global_shape = tuple(global_shape)
        self.profile = profile
        self._replicates = replicate_parameters
        self._slots = optimizer_slots
        self._dtype = next((p.dtype for p in network.parameters()), torch.float32)
        self.layers: list[tuple[int, tuple[int, ...]]] = []
        clock = Clock(profile, 0)
        try:
            x = torch.empty(self.global_shape, dtype=self._dtype, device=META)
            with Kernels(clock), torch.device(META), torch.no_grad(), self._watched():
                self.network(x)
        # The network is the user's, and may raise anything.
        except Exception as error:
            raise ShapeError(
                f"the network cannot be called with an input of shape {list(self.global_shape)}: "
                f"{error}"
            ) from error
        self.sequential = clock.phase
        self.itemsize = self._dtype.itemsize

    def rehearse(self, grid: Sequence[int], rank: int) -> Rehearsal:
        """A forward and a backward of ``rank``, its input on ``grid``, as a training step has them.

        The loss, which has one cell, is left out.

        Raises:
            GpudistError: the network cannot be converted for this partition, or the planner cannot
                follow it.
        """
        clock = Clock(self.profile, rank)
        wire = DryTransport(
            rank, prod(grid), clock, lambda shape, *_: tuple(shape), self.profile.wire
        )
        P_x = Partition(wire, range(prod(grid))).create_cartesian_topology_partition(grid)
        network = converted_for(
            self.network, P_x, self.global_shape, replicate_parameters=self._replicates
        )
        assert P_x.index is not None
        block = Decomposition.balanced(self.global_shape, grid).block(P_x.index)
        x = torch.empty(block.shape, dtype=self._dtype, device=META)
        saved = _Saved(network)
        try:
            with Kernels(clock), torch.device(META):
                forward, backward = self._step(network, x, clock, saved)
        except GpudistError:
            raise
        # The functions between layers are the user's, and may raise anything on a block.
        except Exception as error:
            words = f"a step of rank {rank} on {list(grid)} fails: {type(error).__name__}: {error}"
            raise ShapeError(words) from error
        parameters = sum(p.numel() * p.element_size() for p in network.parameters())
        memory = Memory(parameters, self._slots * parameters, saved.nbytes)
        return Rehearsal(rank, forward, backward, memory)

    def _step(
        self, network: nn.Module, x: torch.Tensor, clock: Clock, saved: _Saved
    ) -> tuple[Phase, Phase]:
        forward = clock.begin()
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda t: t):
            y = network(x)
        clock.called(len(self.layers))
        backward = clock.begin()
        parts = [t.to_local() for t in tree_leaves(y) if isinstance(t, GlobalTensor)]
        outputs = [t for t in parts if t.requires_grad]
        torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
        clock.called(len(self.layers))
        return forward, backward

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Note the calls of modules without children."""

        def note(module: nn.Module, args: Any) -> None:
            kernel = getattr(module, "kernel_size", 1)
            widest = max(kernel) if isinstance(kernel, tuple) else int(kernel)
            shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
            self.layers += [(widest - 1, shape) for shape in shapes[:1]]

        leaves = [m for m in self.network.modules() if not any(m.children())]
        handles = [module.register_forward_pre_hook(note) for module in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _require_sequential(network: nn.Module) -> None:
    for path, module in network.named_modules():
        if isinstance(module, (DistributedModule, Converted)):
            raise ShapeError(
                f"{path or 'the network'} is a {type(module).__name__}, which has partitions of "
                "its own: the planner takes the sequential network, of torch's modules"
            )


class _Saved:
    """Bytes of the storages that autograd keeps, those of parameters left out."""

    def __init__(self, network: nn.Module) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in network.parameters()}
        self._kept: dict[int, torch.UntypedStorage] = {}

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._parameters:
            self._kept[storage._cdata] = storage
        return x

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())
