"""Simulated clock of one rank's step, which counts time, operations and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log2, sqrt
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from gpudist.cache import Cache
from gpudist.checks.arguments import Checked
from gpudist.checks.storage import PLAIN
from gpudist.exchange.tracing import Watching
from gpudist.planning.hardware import Link, Profile
from gpudist.planning.kernel_times import key_of
from gpudist.planning.live_bytes import LiveBytes
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.transport.dry import META, Posted, SharedCollective, Traffic

# Positions of the weight, the groups, the transposed flag and the stride among the arguments.
_CONVOLUTIONS = {"convolution": (1, 8, 6, 3), "convolution_backward": (2, 9, 7, 4)}
# Operations that run no kernel although they are not marked as views: they return memory that is
# not written, a tensor on the same memory, or no tensor.
FREE = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "detach", "alias", "_unsafe_view", "lift_fresh", "resize_", "set_", "is_same_size",
    "_has_compatible_shallow_copy_type",
})  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One torch operation.

    Attributes:
        flops: number of additions and multiplications.
        size_bytes: bytes read and written.
        dtype: dtype of the result.
        channels: for a convolution, channels in each group: outputs for forward, and the mean of
            inputs and outputs for backward; 0 for other operations.
        is_backward: whether it computes gradients of a convolution.
        stride: largest stride of a convolution.
        seconds: measured time, with its start; ``None`` if it was not measured.
    """

    flops: int
    size_bytes: int
    dtype: torch.dtype
    channels: float = 0.0
    is_backward: bool = False
    stride: int = 1
    seconds: float | None = None

    @property
    def term(self) -> str:
        """Key of the kernel's seconds in :attr:`Phase.terms_s`."""
        if self.channels:
            return "convolutions"
        return "products" if self.flops else "other kernels"


@dataclass
class Phase(Checked):
    """Work of one rank in a forward or backward pass.

    Attributes:
        messages: number of messages sent, including collectives that are made of messages.
        message_bytes: bytes sent in these messages.
        received: number of messages received.
        received_bytes: bytes received in these messages.
        collectives: number of collectives of the transport itself.
        collective_bytes: bytes that this rank contributes to them or receives from them.
        flops: additions and multiplications of convolutions and matrix products.
        compute_s: seconds of kernels, and of Python for layers.
        message_s: seconds of packing, messages and unpacking, one after the other.
        terms_s: seconds of ``compute_s`` and ``message_s`` by what takes them.
        serial_s: seconds of both without overlap.
        overlapped_s: seconds if messages that start early are transferred while kernels run.
    """

    messages: int = 0
    message_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    flops: int = 0
    compute_s: float = 0.0
    message_s: float = 0.0
    overlapped_s: float = 0.0
    terms_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def serial_s(self) -> float:
        return self.compute_s + self.message_s


@dataclass
class Clock:
    """Listener to a dry transport and to torch operations that sums times in the current phase.

    Args:
        profile: profile of the machine.
        rank: world rank of this rank.
        phase: phase to add to.
        staging_bytes: bytes of the messages of one group at most, sent and received.
    """

    profile: Profile
    rank: int
    phase: Phase = field(default_factory=Phase)
    staging_bytes: int = 0
    _wire_free_s: float = 0.0

    def begin(self) -> Phase:
        """Start a new phase and return it."""
        self.phase, self._wire_free_s = Phase(), 0.0
        return self.phase

    def add_kernel(self, kernel: Kernel) -> None:
        """Add a kernel by its measured time, or the longer one of its operations and its bytes."""
        self.phase.flops += kernel.flops
        if kernel.seconds is not None:
            self._compute(kernel.term, kernel.seconds)
            return
        by_flops = kernel.flops / self._flops_per_s(kernel)
        by_bytes = kernel.size_bytes / (self.profile.memory_gbps * 1e9)
        self._compute("kernel starts", self.profile.kernel_us * 1e-6)
        self._compute(kernel.term, max(by_flops, by_bytes))

    def add_layers(self, layers: int) -> None:
        """Add the Python time of calls of ``layers`` layers, of their backward, or of moves."""
        self._compute("layers", layers * self.profile.layer_us * 1e-6)

    def exchange(self, traffic: Traffic) -> None:
        self.wait(self.start(traffic))

    def start(self, traffic: Traffic) -> float:
        phase = self.phase
        phase.messages += len(traffic.sends)
        phase.message_bytes += sum(message.size_bytes for message in traffic.sends)
        phase.received += len(traffic.receives)
        phase.received_bytes += sum(message.size_bytes for message in traffic.receives)
        phase.collectives += len(traffic.collectives)
        phase.collective_bytes += sum(shared.size_bytes for shared in traffic.collectives)
        moved = sum(message.size_bytes for message in (*traffic.sends, *traffic.receives))
        self.staging_bytes = max(self.staging_bytes, moved)
        copies_s = self._copies(traffic)
        levels_s, collectives_s = self._messages_s(traffic), self._collectives_s(traffic)
        transfer_s = levels_s + collectives_s
        phase.message_s += copies_s + transfer_s
        self._note("packing", copies_s)
        self._note("messages", levels_s)
        self._note("collectives", collectives_s)
        phase.overlapped_s += copies_s
        self._wire_free_s = max(self._wire_free_s, phase.overlapped_s) + transfer_s
        return self._wire_free_s

    def wait(self, started: Any) -> None:
        self.phase.overlapped_s = max(self.phase.overlapped_s, started)

    def _compute(self, term: str, seconds: float) -> None:
        self._note(term, seconds)
        self.phase.compute_s += seconds
        self.phase.overlapped_s += seconds

    def _note(self, term: str, seconds: float) -> None:
        self.phase.terms_s[term] = self.phase.terms_s.get(term, 0.0) + seconds

    def _flops_per_s(self, kernel: Kernel) -> float:
        name = str(kernel.dtype).removeprefix("torch.")
        if not kernel.channels:
            return self.profile.flops_per_s(name)
        # Backward computes two gradients.
        forward_flops = kernel.flops / 2 if kernel.is_backward else kernel.flops
        return self.profile.convolution_flops_per_s(
            name, kernel.channels, kernel.is_backward, kernel.stride, forward_flops
        )

    def _copies(self, traffic: Traffic) -> float:
        messages = (*traffic.sends, *traffic.receives)
        size_bytes = sum(message.size_bytes for message in messages) + traffic.copied_bytes
        rows = sum(message.rows for message in messages)
        kernels = (bool(messages) + bool(traffic.receives)) * self.profile.kernel_us * 1e-6
        moving_s = 2 * size_bytes / (self.profile.memory_gbps * 1e9)
        return kernels + moving_s + rows * self.profile.row_ns * 1e-9

    def transfer_s(self, traffic: Traffic) -> float:
        """Seconds that a group of messages and collectives takes on the wire, without packing."""
        return self._messages_s(traffic) + self._collectives_s(traffic)

    def _messages_s(self, traffic: Traffic) -> float:
        return max(
            _group_s(
                link,
                [m for m in traffic.sends if self._is_near(m.peer) == near],
                [m for m in traffic.receives if self._is_near(m.peer) == near],
            )
            for near, link in ((True, self.profile.node), (False, self.profile.network))
        )

    def _collectives_s(self, traffic: Traffic) -> float:
        return sum(map(self._collective_s, traffic.collectives))

    def _is_near(self, peer: int) -> bool:
        per_node = self.profile.ranks_per_node
        return peer // per_node == self.rank // per_node

    def _collective_s(self, shared: SharedCollective) -> float:
        """Return the seconds of a collective: bytes of a ring, and for sums latencies of a tree."""
        profile, rates = self.profile, self.profile.collectives
        size, sums = len(shared.members), shared.kind == "all_reduce"
        beside = sum(map(self._is_near, shared.members))
        near = beside == size
        latency_s = self._collective_latency_s(shared, near, beside)
        within = rates.gbps * 1e9 if rates is not None else profile.node.bytes_per_s
        # A ring enters and leaves a node once, over the links of all its members there.
        between = inf if near else beside * profile.network.bytes_per_s
        if not (sums and rates is not None and rates.switch_share and beside > 1):
            passes = 2 * (size - 1) / size if sums else 1.0
            return latency_s + passes * shared.size_bytes / min(within, between)
        nodes = self._nodes(shared)
        # A rank sends all its terms to the switch and gets its part of the sums, then the reverse.
        added_s = (1 + 1 / beside) * shared.size_bytes / (rates.switch_share * within)
        return latency_s + max(added_s, 2 * (nodes - 1) / nodes * shared.size_bytes / between)

    def _collective_latency_s(self, shared: SharedCollective, near: bool, beside: int) -> float:
        rates, size = self.profile.collectives, len(shared.members)
        sums = shared.kind == "all_reduce"
        both_ways = 2 if sums else 1
        if rates is None:
            link = self.profile.node if near else self.profile.network
            depth = ceil(log2(max(2, size)))
            return (link.latency_us + both_ways * depth * link.message_us) * 1e-6
        nodes = self._nodes(shared)
        # Sums travel along trees between nodes, copies along a ring through every rank.
        if sums:
            steps_us = (beside - 1) * rates.node_step_us + log2(nodes) * rates.network_step_us
        else:
            steps_us = (size - nodes) * rates.node_step_us + (nodes - 1) * rates.network_step_us
        return (rates.base_us + both_ways * steps_us) * 1e-6

    def _nodes(self, shared: SharedCollective) -> int:
        return len({member // self.profile.ranks_per_node for member in shared.members})


def _group_s(link: Link, sends: Sequence[Posted], receives: Sequence[Posted]) -> float:
    count = max(len(sends), len(receives))
    if not count:
        return 0.0
    size_bytes = max(sum(m.size_bytes for m in side) for side in (sends, receives))
    return (link.latency_us + (count - 1) * link.message_us) * 1e-6 + size_bytes / link.bytes_per_s


# Results of operations that only make tensors, by operation and arguments.
_results = Cache[Any, Any](8192)
_empty_strided: Any = torch.ops.aten.empty_strided.default


class Repeating(Watching):
    """Mode that computes the results of equal calls on tensors without data only once.

    Torch computes most shapes in Python, in up to a millisecond.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return _repeated(func, args, kwargs, tensors_in([args, kwargs]))


def _repeated(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[torch.Tensor]
) -> Any:
    makes_no_data = all(map(_has_no_data, inputs)) and kwargs.get("device") in (None, META)
    if not makes_no_data or func.is_view or func.namespace != "aten":
        return func(*args, **kwargs)
    key = func, _hashable(args), _hashable(kwargs), torch.get_default_dtype()
    known = _results.get(key)
    if known is not None:
        return map_tree(known, _like)
    result = func(*args, **kwargs)
    outputs = tensors_in(result)
    if outputs and all(map(_fills_its_memory, outputs)):
        # Functions in place, and a few others, return memory of their arguments.
        places = [x.untyped_storage()._cdata for x in (*outputs, *inputs)]
        if len({*places}) == len(outputs) + len({*places[len(outputs) :]}):
            _results[key] = map_tree(result, _like)
    return result


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple([(name, _hashable(part)) for name, part in value.items()])
    # 1 and 1.0 are equal.
    return type(value), value


def _has_no_data(x: torch.Tensor) -> bool:
    return x.is_meta and type(x) in PLAIN and x.layout == torch.strided and not x.is_complex()


def _fills_its_memory(x: torch.Tensor) -> bool:
    return _has_no_data(x) and x.nbytes == x.untyped_storage().nbytes()


def _like(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return _empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)


class Kernels(Repeating):
    """Mode that reports every torch operation that runs a kernel to a clock.

    Args:
        clock: clock.
        live: counter of the results' bytes.
    """

    def __init__(self, clock: Clock, live: LiveBytes | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._live = live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet.__name__ == "_local_scalar_dense" and args[0].is_meta:
            # A copy to the host, which raises here: the caller knows the value.
            self._clock.add_kernel(Kernel(0, args[0].nbytes, args[0].dtype))
        inputs = tensors_in([args, kwargs])
        result = _repeated(func, args, kwargs, inputs)
        # Values that are known in a dry run are computed on the CPU.
        outputs = [y for y in tensors_in(result) if y.is_meta]
        if self._live is not None:
            for x in outputs:
                self._live.add(x)
        if not outputs or func.is_view or packet.__name__ in FREE:
            return result
        flops_of: Callable[..., int] | None = flop_registry.get(packet)
        flops = flops_of(*args, **kwargs, out_val=result) if flops_of is not None else 0
        size_bytes = sum(x.nbytes for x in (*inputs, *outputs))
        if size_bytes:
            convolved, times = _convolution_of(packet.__name__, args), self._clock.profile.kernels
            seconds = None if times is None else times.get(key_of(func, args, kwargs)) or None
            self._clock.add_kernel(Kernel(flops, size_bytes, outputs[0].dtype, *convolved, seconds))
        return result


def _convolution_of(name: str, args: Any) -> tuple[float, bool, int]:
    """Return channels per group of a convolution (0 for others), whether backward, and stride."""
    if name not in _CONVOLUTIONS:
        return 0.0, False, 1
    weight, groups, is_transposed, strides = (args[at] for at in _CONVOLUTIONS[name])
    out, into, stride = weight.shape[0] // groups, weight.shape[1], max(strides)
    if name == "convolution_backward":
        return sqrt(out * into), True, stride
    return float(into if is_transposed else out), False, stride
