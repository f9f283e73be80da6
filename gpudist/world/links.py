"""Links between the GPUs of this machine, as reported by ``nvidia-smi``."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_KINDS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe of one socket",
    "NODE": "several PCIe roots of one socket",
    "SYS": "between sockets",
}
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class GpuLink:
    """Link between two GPUs.

    Attributes:
        first, second: indices of the GPUs.
        kind: link type as printed by ``nvidia-smi``, such as ``"NV18"``.
        words: description of the link type.
    """

    first: int
    second: int
    kind: str
    words: str


def gpu_links() -> tuple[GpuLink, ...]:
    """Return the GPU links of this machine; empty if ``nvidia-smi`` is missing."""
    try:
        ended = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_topology(ended.stdout)


def parse_topology(text: str) -> tuple[GpuLink, ...]:
    """Parse the table printed by ``nvidia-smi topo -m`` into one link per pair of GPUs."""
    links: list[GpuLink] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if len(words) < 2 or not re.fullmatch(r"GPU\d+", words[0]) or words[1].startswith("GPU"):
            continue
        first = int(words[0][3:])
        kinds = words[1 : first + 1]
        links += [
            GpuLink(second, first, kind, _in_words(kind)) for second, kind in enumerate(kinds)
        ]
    return tuple(sorted(links, key=lambda link: (link.first, link.second)))


def _in_words(kind: str) -> str:
    if kind.startswith("NV"):
        return f"{kind[2:]} NVLinks"
    return _KINDS.get(kind, "")
