"""Rates of GPUs by which layers choose between ways whose messages differ."""

from __future__ import annotations

from typing import NamedTuple


class GpuRates(NamedTuple):
    """Rates of one kind of GPU.

    Attributes:
        copied_bytes_per_s: bytes that a copy reads and writes in a second.
        face_s: time of the few short kernels of a face, such as its convolution and its sum.
        message_s: time of a group of messages within a node, without their bytes.
    """

    copied_bytes_per_s: float
    face_s: float
    message_s: float


# The copy and the face of an H200 are measured; an H100 copies in proportion to its memory's rate.
RATES = {"H100": GpuRates(2.8e12, 20e-6, 10e-6), "H200": GpuRates(4e12, 20e-6, 10e-6)}


def rates_of(gpu: str) -> GpuRates:
    """Return the rates of a GPU by its name; of the fastest known for other names."""
    return next((rates for name, rates in RATES.items() if name in gpu), RATES["H200"])
