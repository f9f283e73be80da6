"""Rehearse one rank's training step of a converted network, with plans but without data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gpudist.checks.arguments import Checked
from gpudist.convert.converted import Converted, conversion_of
from gpudist.convert.dry_run import convert_dry, without_cells
from gpudist.convert.known import KnownValues, know_copy
from gpudist.convert.network_plan import NetworkPlan
from gpudist.errors import GpudistError, ShapeError
from gpudist.nn.autocast_on_meta import autocast_on_meta, patched_autocast
from gpudist.nn.distributed_module import DistributedModule
from gpudist.planning.clock import Clock, Kernels, Phase, Repeating
from gpudist.planning.hardware import Profile
from gpudist.planning.layer_inputs import misfit
from gpudist.planning.live_bytes import LiveBytes, StandInLoss, update_bytes
from gpudist.sbp.global_parameter import block_of
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.transport.dry import META, DryTransport
from gpudist.world.partition import Partition


@dataclass(frozen=True)
class Memory(Checked):
    """Bytes of a rank's tensors when they are most in a training step.

    Attributes:
        parameters: bytes of the rank's own parameters and buffers.
        optimizer: bytes of the optimizer's state for them.
        activations: bytes of the input and of what is saved for backward, including ghosts.
        gradients: bytes of the parameters' gradients that exist then.
        temporary: bytes of all other tensors, such as gradients of activations and padded copies.
        staging: bytes of the transport's memory for packed and received cells.
    """

    parameters: int
    optimizer: int
    activations: int
    gradients: int = 0
    temporary: int = 0
    staging: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class Rehearsal(Checked):
    """Work of one rank of a partition in a training step.

    Attributes:
        rank: world rank of this rank.
        forward: messages, operations and times of the forward.
        backward: messages, operations and times of the backward.
        memory: bytes of the rank's tensors at their peak.
        input_s: seconds to read the rank's block of the input, while the previous step runs.
    """

    rank: int
    forward: Phase
    backward: Phase
    memory: Memory
    input_s: float = 0.0

    @property
    def messages(self) -> int:
        """Number of messages sent in forward and backward."""
        return self.forward.messages + self.backward.messages

    @property
    def message_bytes(self) -> int:
        return self.forward.message_bytes + self.backward.message_bytes

    def seconds(self, overlapped: bool) -> float:
        """Predict the time of a step.

        Args:
            overlapped: whether messages move while kernels run.

        Returns:
            Seconds of forward and backward, or of reading the input if that takes longer.
        """
        phases = (self.forward, self.backward)
        step_s = sum(p.overlapped_s if overlapped else p.serial_s for p in phases)
        return max(step_s, self.input_s)


class DryNetwork:
    """Network without data that can be rehearsed on any partition.

    Args:
        network: network of torch modules; not modified, and its weights are not copied.
        global_shape: global shape of its input, or a tensor that has the shape and dtype.
        profile: profile of the machine.
        replicate_parameters: see :func:`gpudist.distribute`.
        optimizer: name of the optimizer, as in ``OPTIMIZERS``.
        others: shapes of further inputs, or tensors that have the shape and dtype.
        amp: 16-bit dtype of autocast, with the casts of the profile's type of device; or ``None``.

    Raises:
        ShapeError: if the network cannot be called with such an input, or is already distributed.

    Attributes:
        training: whether a step has a backward and an update.
        sequential: computation of a forward of the whole network on one rank.
        layers: for every call of a layer, the largest number of cells that an output reads in
            addition to its own, and the global shape of the input.
    """

    def __init__(
        self,
        network: nn.Module,
        global_shape: Sequence[int] | torch.Tensor,
        profile: Profile,
        replicate_parameters: bool = True,
        optimizer: str = "adam",
        others: Sequence[Sequence[int] | torch.Tensor] = (),
        amp: torch.dtype | None = None,
    ) -> None:
        _require_sequential(network)
        self.network = without_cells(network)
        self.profile, self.training = profile, True
        self._replicates = replicate_parameters
        self._optimizer = optimizer
        self._amp = amp
        self._dtype = next((p.dtype for p in network.parameters()), torch.float32)
        self._inputs = [self._whole(x) for x in (global_shape, *others)]
        self.global_shape = tuple(self._inputs[0].shape)
        self.layers: list[tuple[int, tuple[int, ...]]] = []
        self._unfinished: tuple[nn.Module, tuple[int, ...]] | None = None
        clock = Clock(profile, 0)
        try:
            with (
                patched_autocast(),
                Kernels(clock),
                self.on_meta(),
                torch.no_grad(),
                self._record_layers(),
                KnownValues(),
            ):
                self.network(*self._inputs)
        # The user's network may raise any exception.
        except Exception as error:
            shapes = " and ".join(str(list(x.shape)) for x in self._inputs)
            raise ShapeError(
                f"the network cannot be called with an input of shape {shapes}: "
                f"{self._in_layer() or error}"
            ) from error
        self.sequential = clock.phase
        self.itemsize = (amp or self._dtype).itemsize

    def _whole(self, x: Sequence[int] | torch.Tensor) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            whole = torch.empty_like(x, device=META)
            # Values of tensors without memory of their own are unknown.
            with suppress(RuntimeError):
                know_copy(whole, x, {})
            return whole
        try:
            return torch.empty(tuple(x), dtype=self._dtype, device=META)
        except (RuntimeError, TypeError) as error:
            raise ShapeError(
                f"the network cannot be called with an input of shape {list(x)}: torch has no "
                "tensors of that many cells"
            ) from error

    def rehearse(
        self, grid: Sequence[int], rank: int, plan: NetworkPlan | None = None
    ) -> Rehearsal:
        """Rehearse a forward and a backward of ``rank`` with its input on ``grid``.

        The loss, which has one cell, is not counted.

        Args:
            grid: shape of the partition of the input.
            rank: the rank.
            plan: edits that the network follows.

        Raises:
            GpudistError: if the network cannot be converted for this partition, or the planner
                cannot follow it.
        """
        network, inputs, clock = self.convert(grid, rank, plan)
        blocks = [block_of(p) for p in network.parameters()]
        held = [*blocks, *map(block_of, network.buffers())]
        live = LiveBytes(held)
        kept = KeptForBackward(held, live)
        for x in inputs:
            live.add(x)
        entered = [live.number_of(x) for x in inputs]
        learns = torch.set_grad_enabled(self.training)
        with _step_errors(grid, rank), learns:
            # Makes the layers, which only the first call does.
            with self.on_meta(), Repeating():
                network(*inputs)
            with Kernels(clock, live), torch.device(META):
                forward, backward = self._step(network, inputs, clock, kept)
        memory = self._memory(network, blocks, held, live, [*kept.numbers, *entered], clock)
        x = inputs[0]
        gbps = self.profile.input_gbps
        input_s = x.numel() * x.element_size() / (gbps * 1e9) if gbps else 0.0
        return Rehearsal(rank, forward, backward, memory, input_s)

    def _memory(
        self, network: nn.Module, blocks: Sequence[torch.Tensor], held: Sequence[torch.Tensor],
        live: LiveBytes, saved: Sequence[int], clock: Clock,
    ) -> Memory:  # fmt: skip
        """Return the memory at the peak: of forward and backward, or of the update if it is more.

        Optimizers of torch update all parameters together on GPUs, with temporary tensors.
        """
        on_gpu = self.profile.wire == "nccl"
        learned = [block for block in blocks if block.requires_grad and self.training]
        state_bytes, update_bytes_ = update_bytes(learned, self._optimizer, on_gpu)
        gradients = [block_of(p.grad) for p in network.parameters() if p.grad is not None]
        numbers = [live.number_of(x) for x in gradients]
        own_bytes = sum(x.nbytes for x in held)
        staging = clock.staging_bytes if on_gpu else 0
        active, summed, temporary = live.at_peak(saved, numbers)
        after = sum(x.nbytes for x in gradients)
        if live.now_bytes + update_bytes_ <= live.peak_bytes:
            return Memory(own_bytes, state_bytes, active, summed, temporary, staging)
        inputs = live.now_bytes - after
        return Memory(own_bytes, state_bytes, inputs, after, update_bytes_, staging)

    def require_forward(self, grid: Sequence[int]) -> None:
        """Run a forward of the first rank with its input on ``grid``.

        Raises:
            GpudistError: as :meth:`rehearse`, if the forward is the reason.
        """
        network, inputs, _ = self.convert(grid, 0)
        with _step_errors(grid, 0), self.on_meta():
            network(*inputs)

    @contextmanager
    def on_meta(self) -> Iterator[None]:
        """Make tensors without data, cast by the autocast of the step."""
        with torch.device(META), self._autocast():
            yield

    def _autocast(self) -> AbstractContextManager[object]:
        type = "cuda" if self.profile.wire == "nccl" else "cpu"
        return autocast_on_meta(type, self._amp) if self._amp else nullcontext()

    def convert(
        self, grid: Sequence[int], rank: int, plan: NetworkPlan | None = None
    ) -> tuple[Any, list[torch.Tensor], Clock]:
        """Return the network of one rank, its blocks of the inputs, and the clock of its wire."""
        clock = Clock(self.profile, rank)
        wire = DryTransport(
            rank, prod(grid), clock, lambda shape, *_: tuple(shape), self.profile.wire
        )
        P_x = Partition(wire, range(prod(grid))).create_cartesian_topology_partition(grid)
        network, inputs = convert_dry(self.network, P_x, self._inputs, self._replicates, plan)
        return network, inputs, clock

    def _step(
        self, network: nn.Module, inputs: list[torch.Tensor], clock: Clock, kept: KeptForBackward
    ) -> tuple[Phase, Phase]:
        forward = clock.begin()
        moves = conversion_of(network).scope.moves
        with self._autocast(), kept:
            y = network(*inputs)
            parts = [t.to_local() for t in tree_leaves(y) if isinstance(t, GlobalTensor)]
            losses: list[Any] = [StandInLoss.apply(t) for t in parts if t.requires_grad]
        del y, parts
        clock.add_layers(len(self.layers) + conversion_of(network).scope.moves - moves)
        backward = clock.begin()
        if not self.training:
            return forward, backward
        torch.autograd.backward(losses, [torch.empty_like(t) for t in losses])
        clock.add_layers(len(self.layers))
        return forward, backward

    @contextmanager
    def _record_layers(self) -> Iterator[None]:
        """Record the calls of modules without children."""

        def note(module: nn.Module, args: Any) -> None:
            kernel = getattr(module, "kernel_size", 1)
            widest = max(kernel) if isinstance(kernel, tuple) else int(kernel)
            shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
            self.layers += [(widest - 1, shape) for shape in shapes[:1]]
            self._unfinished = (module, shapes[0]) if shapes else None

        def finish(module: nn.Module, args: Any, output: Any) -> None:
            self._unfinished = None

        leaves = [m for m in self.network.modules() if not any(m.children())]
        handles = [module.register_forward_pre_hook(note) for module in leaves]
        handles += [module.register_forward_hook(finish) for module in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _in_layer(self) -> str:
        """Return which layer failed, what it expects and what it got; ``""`` if unknown."""
        if self._unfinished is None:
            return ""
        layer, shape = self._unfinished
        expected = misfit(layer, shape)
        path = next(name for name, module in self.network.named_modules() if module is layer)
        name = f"layer {path!r}" if path else "it"
        kind = type(layer).__name__
        got = f"and got an input of shape {list(shape)}"
        return f"{name}, a {kind}, expects {expected}, {got}" if expected else ""


@contextmanager
def _step_errors(grid: Sequence[int], rank: int) -> Iterator[None]:
    try:
        yield
    except GpudistError:
        raise
    # The user's functions between layers may raise any exception on a block.
    except Exception as error:
        words = f"a step of rank {rank} on {list(grid)} fails: {type(error).__name__}: {error}"
        raise ShapeError(words) from error


def _require_sequential(network: nn.Module) -> None:
    for path, module in network.named_modules():
        if isinstance(module, (DistributedModule, Converted)):
            raise ShapeError(
                f"{path or 'the network'} is a {type(module).__name__}, which is already "
                "distributed; pass the network of torch's modules, such as "
                "gpudist.sequential(network)"
            )


class KeptForBackward(torch.autograd.graph.saved_tensors_hooks):
    """Counter of the bytes that autograd keeps for what is computed in its ``with`` block.

    A storage counts once and whole, however many tensors and views of it are kept. Operations of
    other threads do not count.

    Args:
        held: tensors whose storages do not count, such as parameters.
        live: counter that follows the storages.

    Attributes:
        nbytes: bytes of all that was kept.
        numbers: numbers of the storages in ``live``.
    """

    def __init__(self, held: Iterable[torch.Tensor] = (), live: LiveBytes | None = None) -> None:
        super().__init__(self._keep, lambda x: x)
        self._held = {x.untyped_storage()._cdata for x in held}
        self._kept: dict[int, Any] = {}
        self._live = live
        self.nbytes, self.numbers = 0, set[int]()

    def _keep(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        known = self._kept.get(storage._cdata, lambda: None)()
        if storage._cdata not in self._held and known is None:
            # Another storage may get the address of one that was freed.
            self._kept[storage._cdata] = ref(storage)
            self.nbytes += storage.nbytes()
            if self._live is not None:
                self.numbers.add(self._live.number_of(x))
        # The tensor itself would keep the node that saves it alive for ever, if it is its result.
        return x.detach()
