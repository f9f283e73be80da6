"""What machines do a second: the figures that predictions are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any, get_args

from gpudist.checks.arguments import Checked, checked
from gpudist.errors import ShapeError
from gpudist.transport.dry import Wire


@dataclass(frozen=True)
class Link(Checked):
    """What carries messages between two ranks.

    Attributes:
        latency_us: from the call to the arrival of a message without cells.
        message_us: of each further message of a group.
        gbps: 10^9 bytes a second, one way; both ways at once.
        shared_by: ranks that use it at the same time, of which each gets its share.
    """

    latency_us: float
    message_us: float
    gbps: float
    shared_by: int = 1

    @property
    def bytes_per_s(self) -> float:
        """Of one rank, while all of them send."""
        return self.gbps * 1e9 / self.shared_by


@dataclass(frozen=True)
class ConvolutionRate(Checked):
    """How fast convolutions of a width are, which kernels for few channels are far from.

    Attributes:
        channels: of the input and of the output, in each group.
        forward_tflops, backward_tflops: 10^12 operations a second.
    """

    channels: int
    forward_tflops: float
    backward_tflops: float


@dataclass(frozen=True)
class Profile(Checked):
    """A machine, as one rank sees it while all ranks work.

    Attributes:
        name: by which it is asked for.
        source: where the figures are from.
        wire: the transport.
        ranks_per_node: world ranks that share a node, the first ones the first.
        node, network: what is between ranks of one node, and of two.
        tflops: 10^12 operations a second of matrix products, in float32, and of convolutions where
            ``convolutions`` is empty.
        memory_gbps: 10^9 bytes a second that kernels read and write.
        kernel_us: of starting one.
        row_ns: of each contiguous row that is packed or unpacked, beside its bytes.
        memory_gib: of a rank; 0 if it is not known.
        tflops_by_dtype: for dtypes other than float32.
        convolutions: rates by channels, ascending.
        layer_us: that Python takes for a layer, forward, and as much backward; 0 where kernels are
            queued ahead.
    """

    name: str
    source: str
    wire: Wire
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

    def __post_init__(self) -> None:
        if self.wire not in get_args(Wire):
            raise ShapeError(f"Profile: wire is {self.wire!r}; it must be one of {get_args(Wire)}")

    @property
    def overlaps(self) -> bool:
        """Whether messages are on their way while the rank computes."""
        return self.wire == "nccl"

    def flops_per_s(self, dtype: str) -> float:
        """Of operands of ``dtype``, such as ``"bfloat16"``."""
        return self.tflops_by_dtype.get(dtype, self.tflops) * 1e12

    def convolution_flops_per_s(self, dtype: str, channels: float, backward: bool) -> float:
        """Of so many channels in each group; between those that are known, along a power law."""
        whole = self.flops_per_s(dtype)
        if not self.convolutions:
            return whole
        rates = [
            (rate.channels, rate.backward_tflops if backward else rate.forward_tflops)
            for rate in self.convolutions
        ]
        return whole * _between(rates, channels) / self.tflops

    @checked()
    def save(self, path: str | Path) -> None:
        """Write the figures as JSON, for :func:`profile_of`."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


@checked()
def profile_of(name: str | Path) -> Profile:
    """The built-in profile of this name, or the one in this file.

    Raises:
        ShapeError: there is no such profile, or the file does not hold one.
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
        return Profile(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ShapeError(f"{path} holds no profile: {error}") from error


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` on lines between ``points`` on logarithmic scales; flat beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if x <= high:
            return first * (second / first) ** (log(x / low) / log(high / low))
    return points[-1][1]


_HOPPER = {"float64": 67.0, "bfloat16": 989.0, "float16": 989.0}
_NDR = "DGX H100 user guide: 8 ConnectX-7 of 400 Gb/s, one for each GPU"

# Nominal figures of vendors, dense and not measured. Latencies, and the time to start a kernel, are
# of the usual order of NCCL and CUDA. A row costs a sector of 32 bytes of memory on both sides.
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
