"""How the GPUs of this machine are linked, as the driver's own tool says."""

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
class Link:
    """Between two GPUs.

    Attributes:
        first, second: their numbers.
        kind: such as ``"NV18"``, as the tool says it.
        words: what that means.
    """

    first: int
    second: int
    kind: str
    words: str


def gpu_links() -> tuple[Link, ...]:
    """The links of this machine; empty with fewer than two GPUs, or without ``nvidia-smi``."""
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


def parse_topology(text: str) -> tuple[Link, ...]:
    """The links in the table that ``nvidia-smi topo -m`` prints; each pair once."""
    links: list[Link] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if len(words) < 2 or not re.fullmatch(r"GPU\d+", words[0]) or words[1].startswith("GPU"):
            continue
        first = int(words[0][3:])
        kinds = words[1 : first + 1]
        links += [Link(second, first, kind, _in_words(kind)) for second, kind in enumerate(kinds)]
    return tuple(sorted(links, key=lambda link: (link.first, link.second)))


def _in_words(kind: str) -> str:
    if kind.startswith("NV"):
        return f"{kind[2:]} NVLinks"
    return _KINDS.get(kind, "")
