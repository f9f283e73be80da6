"""Machine profiles: rates and latencies on which predictions are based."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf, log
from pathlib import Path
from typing import Any, get_args

import torch

from gpudist.checks.arguments import Checked, checked
from gpudist.errors import ShapeError
from gpudist.transport.dry import Posting


@dataclass(frozen=True)
class Link(Checked):
    """Link that carries messages between two ranks.

    Attributes:
        latency_us: microseconds from the call to the arrival of an empty message.
        message_us: microseconds for each further message of a group.
        gbps: 10^9 bytes per second in each direction, with both directions in use.
        shared_by: number of ranks that share the link equally at the same time.
    """

    latency_us: float
    message_us: float
    gbps: float
    shared_by: int = 1

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of one rank while all ranks send."""
        return self.gbps * 1e9 / self.shared_by


@dataclass(frozen=True)
class ConvolutionRate(Checked):
    """Speed of convolutions of one width; kernels of few channels or operations are far slower.

    Attributes:
        channels: number of input and of output channels, in each group.
        forward_tflops: 10^12 operations a second, forward.
        backward_tflops: 10^12 operations a second, backward.
        dtype: dtype of the operands, such as ``"float16"``.
        stride: largest stride of the convolution.
        gflop: 10^9 operations of the convolution forward; 0 for any number.
    """

    channels: int
    forward_tflops: float
    backward_tflops: float
    dtype: str = "float32"
    stride: int = 1
    gflop: float = 0.0


@dataclass(frozen=True)
class CollectiveRates(Checked):
    """Speed of the transport's own collectives, whose members pass bytes on along a ring.

    Attributes:
        base_us: microseconds of a collective without steps and bytes.
        node_step_us: microseconds for each step to another rank of the node.
        network_step_us: microseconds for each step to another node.
        gbps: 10^9 bytes per second that a rank passes on within a node.
        switch_share: part of ``gbps`` that sums reach if the switch of the node adds, as NVLink
            SHARP does; 0 if it does not add.
    """

    base_us: float
    node_step_us: float
    network_step_us: float
    gbps: float
    switch_share: float = 0.0


@dataclass(frozen=True)
class Profile(Checked):
    """Rates and latencies of a machine, as one rank sees it while all ranks work.

    Attributes:
        name: name of the profile.
        source: origin of the figures.
        wire: name of the transport.
        ranks_per_node: number of consecutive world ranks that share a node.
        node: link between two ranks of one node.
        network: link between two ranks of different nodes.
        tflops: 10^12 operations per second of float32 matrix products, and of convolutions if
            ``convolutions`` is empty.
        memory_gbps: 10^9 bytes per second that kernels read and write.
        kernel_us: microseconds to start a kernel.
        row_ns: nanoseconds for each contiguous row that is packed or unpacked, in addition to its
            bytes.
        memory_gib: memory of a rank in GiB; 0 if unknown.
        tflops_by_dtype: 10^12 operations a second for dtypes other than float32.
        convolutions: rates of convolutions by channels, ascending for each dtype and stride, and by
            operations, ascending for each number of channels.
        layer_us: microseconds that Python takes for a layer in forward, in backward, and for a
            tensor that a plan moves in forward; 0 if kernels are queued ahead.
        collectives: speed of the transport's collectives; ``None`` derives it from the links.
        input_gbps: 10^9 bytes per second at which a rank reads its block of the input, ahead of the
            step that needs it; 0 leaves reading out.
        measured_on: number of ranks that measured the figures together; 0 if they were not
            measured in this way.
        kernels: seconds of single kernels by their keys, as :func:`timed_kernels` returns them; 0
            for one that rates predict.
    """

    name: str
    source: str
    wire: Posting
    ranks_per_node: int
    node: Link
    network: Link
    tflops: float
    memory_gbps: float
    kernel_us: float
    row_ns: float = 0.0
    memory_gib: float = 0.0
    tflops_by_dtype: dict[str, float] = field(default_factory=dict[str, float], hash=False)
    convolutions: tuple[ConvolutionRate, ...] = ()
    layer_us: float = 0.0
    collectives: CollectiveRates | None = None
    input_gbps: float = 0.0
    measured_on: int = 0
    kernels: dict[str, float] | None = field(default=None, hash=False, repr=False)

    def __post_init__(self) -> None:
        known = get_args(Posting)
        if self.wire not in known:
            raise ShapeError(f"Profile: wire is {self.wire!r}; it must be one of {known}")

    @property
    def overlaps(self) -> bool:
        """Whether messages are transferred while the rank computes."""
        return self.wire == "nccl"

    def flops_per_s(self, dtype: str) -> float:
        """Return the operations per second on operands of ``dtype``, such as ``"bfloat16"``."""
        return self.tflops_by_dtype.get(dtype, self.tflops) * 1e12

    def convolution_flops_per_s(
        self, dtype: str, channels: float, backward: bool, stride: int = 1, flops: float = inf
    ) -> float:
        """Return the operations per second of convolutions.

        Between known numbers of channels, and of operations, rates follow a power law.

        Args:
            dtype: dtype of the operands, such as ``"bfloat16"``.
            channels: number of channels in each group.
            backward: whether to return the rate of backward instead of forward.
            stride: largest stride.
            flops: operations of the convolution forward.

        Returns:
            Operations per second: of the dtype and stride if the profile has such rates, else of
            the dtype, else those of float32 times the ratio of the two dtypes.
        """
        of_dtype = [rate for rate in self.convolutions if rate.dtype == dtype]
        known = of_dtype or [rate for rate in self.convolutions if rate.dtype == "float32"]
        known = [rate for rate in known if rate.stride == stride] or known
        whole = self.flops_per_s(dtype)
        if not known:
            return whole
        by_channels: dict[int, list[tuple[float, float]]] = {}
        for rate in known:
            if rate.stride == known[0].stride:
                tflops = rate.backward_tflops if backward else rate.forward_tflops
                by_channels.setdefault(rate.channels, []).append((rate.gflop * 1e9, tflops))
        rates = [(count, _between(points, flops)) for count, points in by_channels.items()]
        return _between(rates, channels) * (1e12 if of_dtype else whole / self.tflops)

    @checked()
    def save(self, path: str | Path) -> None:
        """Write the figures as JSON to the file ``path``, for :func:`profile_of`."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


@checked()
def profile_of(name: str | Path) -> Profile:
    """Return a built-in profile, or the profile in a file.

    Args:
        name: name of a built-in profile, or path of a file that :meth:`Profile.save` wrote.

    Returns:
        The profile.

    Raises:
        ShapeError: if ``name`` is neither built in nor a file, or the file does not hold a profile.
    """
    if str(name) in BUILT_IN:
        return BUILT_IN[str(name)]
    path = Path(name)
    if not path.is_file():
        raise ShapeError(
            f"profile {str(name)!r} is neither built in ({', '.join(BUILT_IN)}) nor a file; "
            "gpudist bench profile writes one of this machine"
        )
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fields |= {which: Link(**fields[which]) for which in ("node", "network")}
        rates = fields.get("convolutions", ())
        fields["convolutions"] = tuple(ConvolutionRate(**rate) for rate in rates)
        if fields.get("collectives") is not None:
            fields["collectives"] = CollectiveRates(**fields["collectives"])
        return Profile(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ShapeError(f"{path} does not contain a profile: {error}") from error


def profile_of_device() -> Profile:
    """Return the built-in profile of this process's device.

    Raises:
        ShapeError: the device is a CPU, or none of the built-in profiles is its own.
    """
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    profiles = (known for words, known in _DEVICES if all(word in name for word in words))
    profile = next(profiles, None)
    if profile is None:
        raise ShapeError(
            f"the device is {name}, but built-in profiles are for {', '.join(BUILT_IN)}; measure "
            "one with gpudist bench profile, and pass its file as profile="
        )
    return BUILT_IN[profile]


# Words of the device's name, and the profile.
_DEVICES = (
    (("H200",), "h200"),
    (("H100", "HBM3"), "h100"),
    (("A100", "SXM"), "a100"),
    (("A100", "PCIe"), "pcie"),
)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if x <= high:
            return first * (second / first) ** (log(x / low) / log(high / low))
    return points[-1][1]


_HOPPER = {"float64": 67.0, "bfloat16": 989.0, "float16": 989.0}
_NDR = "DGX H100 user guide: 8 ConnectX-7 of 400 Gb/s, one for each GPU"

# Nominal, dense figures of vendors, not measured. Latencies and the time to start a kernel are the
# usual orders of magnitude for NCCL and CUDA. Each row costs a 32-byte memory sector on both sides.
BUILT_IN = {
    profile.name: profile
    for profile in (
        Profile(
            "h100",
            f"NVIDIA H100 SXM data sheet: TF32 494 TFLOPS without sparsity, HBM3 3.35 TB/s, "
            f"NVLink 900 GB/s both ways; {_NDR}",
            "nccl", 8, Link(10.0, 1.0, 450.0), Link(20.0, 2.0, 50.0),
            494.0, 3350.0, 5.0, 0.019, 80.0, _HOPPER,
        ),
        Profile(
            "h200",
            f"NVIDIA H200 SXM data sheet: TF32 494 TFLOPS without sparsity, HBM3e 4.8 TB/s, "
            f"NVLink 900 GB/s both ways; {_NDR}",
            "nccl", 8, Link(10.0, 1.0, 450.0), Link(20.0, 2.0, 50.0),
            494.0, 4800.0, 5.0, 0.013, 141.0, _HOPPER,
        ),
        Profile(
            "a100",
            "NVIDIA A100 80GB SXM data sheet: TF32 156 TFLOPS, HBM2e 2.039 TB/s, NVLink 600 GB/s "
            "both ways; DGX A100: 8 ConnectX-6 of 200 Gb/s, one for each GPU",
            "nccl", 8, Link(10.0, 1.0, 300.0), Link(20.0, 2.0, 25.0),
            156.0, 2039.0, 5.0, 0.031, 80.0, {"float64": 19.5, "bfloat16": 312.0, "float16": 312.0},
        ),
        Profile(
            "pcie",
            "NVIDIA A100 80GB PCIe data sheet: TF32 156 TFLOPS, HBM2e 1.935 TB/s, PCIe 4.0 x16 "
            "64 GB/s both ways; four to a node that share one network card of 200 Gb/s",
            "nccl", 4, Link(15.0, 2.0, 32.0, 2), Link(25.0, 3.0, 25.0, 4),
            156.0, 1935.0, 5.0, 0.033, 80.0, {"float64": 19.5, "bfloat16": 312.0, "float16": 312.0},
        ),
    )
}  # fmt: skip
"""Built-in profiles by name, with vendors' nominal figures instead of measurements."""
