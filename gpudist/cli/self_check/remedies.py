"""What to do about a world on GPUs that is wrong, slow, or cannot be joined."""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import TypeVar

import torch

from gpudist.checks.digest import digest_of
from gpudist.cli.self_check.link_speeds import LinkSpeed
from gpudist.world import runtime
from gpudist.world.environment import describe, nccl_version
from gpudist.world.links import Link
from gpudist.world.partition import Partition

Key = TypeVar("Key", bound=Hashable)

# Of the median of all links; below it a link is said to be slow.
SLOW_LINK = 0.5
_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of one node send through the host's memory",
    "NCCL_SHM_DISABLE": "ranks of one node without a direct path send through the network",
    "NCCL_IB_DISABLE": "nodes send through sockets, and not by InfiniBand or RoCE",
}
# What NCCL says of a world that cannot be joined, and what to do.
_SAID = {
    "duplicate gpu": "Two ranks of a node have one GPU: start no more processes on a node than it "
    "has GPUs, and let CUDA_VISIBLE_DEVICES show each of them all of these; several ranks on one "
    "GPU need NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1.",
    "mismatched nccl version": "Ranks have different versions of NCCL: compare the line NCCL of "
    "`gpudist env` on every node, and install one.",
    "unhandled system error": "NCCL met an error of the system: run again with NCCL_DEBUG=WARN, "
    "which names it. In a container it is often too small a /dev/shm (docker's --shm-size=1g), "
    "between nodes the wrong interface (NCCL_SOCKET_IFNAME).",
    "socket": "Ranks cannot reach each other: NCCL_SOCKET_IFNAME names the interface that leads to "
    "the other nodes (`ip route get ADDRESS` shows it), and its ports must be open.",
    "out of memory": "A GPU's memory is full: `nvidia-smi` shows whose processes use it.",
}


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what it has.

    Attributes:
        node, gpu: numbers that tell them apart.
        nccl: the version of NCCL, as 22705 for 2.27.5; 0 if none is used.
        number: of the GPU among those that the rank sees.
        off: the paths that its environment switches off, a bit each.
        unreachable: the GPUs whose memory its own cannot reach, a bit each.
    """

    node: int
    gpu: int
    nccl: int = 0
    number: int = 0
    off: int = 0
    unreachable: int = 0


def places(P_world: Partition) -> list[Place]:
    """Every rank's. Collective."""
    rows = P_world.allgather_data(astuple(_own_place(P_world)))
    return [Place(*(int(number) for number in row)) for row in rows]


def _own_place(P_world: Partition) -> Place:
    said = runtime.nccl_variables()
    off = [said.get(name, "0") not in ("", "0") for name in _OFF]
    place = Place(
        _number(socket.gethostname()), _number(f"process {P_world.rank}"), _own_nccl(P_world),
        off=_bits(off),
    )  # fmt: skip
    if P_world.device.type != "cuda":
        return place
    mine = P_world.device.index or 0
    gpu = torch.cuda.get_device_properties(mine)
    identity = str(getattr(gpu, "uuid", "")) or f"{place.node} {mine}"
    unreachable = [
        other != mine and not torch.cuda.can_device_access_peer(mine, other)
        for other in range(torch.cuda.device_count())
    ]
    return replace(place, gpu=_number(identity), number=mine, unreachable=_bits(unreachable))


def _bits(flags: Sequence[bool]) -> int:
    return sum(flag << number for number, flag in enumerate(flags))


def _set_bits(number: int) -> list[int]:
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]


def _own_nccl(P_world: Partition) -> int:
    found = describe().nccl if P_world.transport == "nccl" else None
    if found is None:
        return 0
    major, minor, patch = (int(part) for part in found.version.split("."))
    return 10000 * major + 100 * minor + patch


def _number(text: str) -> int:
    """Of 48 bits."""
    return int.from_bytes(digest_of(text.encode())[:6], "big")


def remedies_of(
    found: Sequence[Place], speeds: Sequence[LinkSpeed], links: Sequence[Link]
) -> list[str]:
    """What the places and speeds of all ranks say, worst first."""
    remedies = [
        f"Ranks {_listed(ranks)} share one GPU and take turns on it: start no more processes on a "
        f"node than it has GPUs."
        for ranks in _by(found, lambda place: (place.node, place.gpu)).values()
        if len(ranks) > 1
    ]
    versions = _by(found, lambda place: place.nccl)
    if len(versions) > 1:
        words = [f"{nccl_version(v)} on ranks {_listed(ranks)}" for v, ranks in versions.items()]
        remedies.append(f"NCCL is {'; '.join(words)}: install one version on all nodes.")
    wrong = [f"{speed.first}-{speed.second}" for speed in speeds if not speed.right]
    if wrong:
        remedies.append(
            f"Bytes were wrong between ranks {', '.join(wrong)}: try NCCL_P2P_DISABLE=1, and if "
            f"that is right, look for IOMMU or ACS between those GPUs, and a newer driver."
        )
    return remedies + _of_paths(found) + _of_slow_links(found, speeds, links)


def _of_paths(found: Sequence[Place]) -> list[str]:
    """Paths that the environment or the machine forbids, where the world would use them."""
    remedies: list[str] = []
    several_nodes = len({place.node for place in found}) > 1
    for bit, (name, effect) in enumerate(_OFF.items()):
        ranks = [rank for rank, place in enumerate(found) if place.off >> bit & 1]
        if ranks and (several_nodes if name == "NCCL_IB_DISABLE" else _have_neighbours(found)):
            remedies.append(f"{name} is set on ranks {_listed(ranks)}, so that {effect}: unset it.")
    used = {(place.node, place.number) for place in found}
    for rank, place in enumerate(found):
        blocked = [bit for bit in _set_bits(place.unreachable) if (place.node, bit) in used]
        if blocked:
            remedies.append(
                f"GPU {place.number} of rank {rank} cannot reach the memory of GPUs "
                f"{_listed(blocked)}, so that messages go through the host: `nvidia-smi topo -p2p "
                f"r` says why; often it is IOMMU or ACS of the PCIe switches, or a virtual machine."
            )
    return remedies


def _have_neighbours(found: Sequence[Place]) -> bool:
    return len({place.node for place in found}) < len(found)


def _of_slow_links(
    found: Sequence[Place], speeds: Sequence[LinkSpeed], links: Sequence[Link]
) -> list[str]:
    """Links are compared with those of their kind: inside a node, and between two."""
    remedies: list[str] = []
    if not all(place.nccl for place in found):
        return remedies  # what links there are is the processor's business
    for inside in (True, False):
        alike = [s for s in speeds if inside == (found[s.first].node == found[s.second].node)]
        if len(alike) < 2:
            continue
        usual = median(speed.gbps for speed in alike)
        for speed in alike:
            if speed.gbps < SLOW_LINK * usual:
                how = kind_of(speed, found, links)
                remedies.append(
                    f"Ranks {speed.first} and {speed.second} exchange {speed.gbps:.1f} GB/s, where "
                    f"{usual:.1f} are usual{f', over {how}' if how else ''}: cut tensors so that "
                    f"neighbours are on faster links, or see why this one is slow, by "
                    f"{'`nvidia-smi nvlink -s`' if inside else 'NCCL_DEBUG=INFO'}."
                )
    return remedies


def kind_of(speed: LinkSpeed, found: Sequence[Place], links: Sequence[Link]) -> str:
    """How the GPUs of two ranks are linked, where that is known."""
    a, b = found[speed.first], found[speed.second]
    if a.node != b.node:
        return "the network"
    numbers = sorted((a.number, b.number))
    return next((x.kind for x in links if [x.first, x.second] == numbers), "")


def of_failure(text: str) -> str:
    """What to do about a world that could not be joined, from its error; empty if not known."""
    lower = text.lower()
    return next((remedy for words, remedy in _SAID.items() if words in lower), "")


def _by(found: Sequence[Place], key: Callable[[Place], Key]) -> dict[Key, list[int]]:
    ranks: dict[Key, list[int]] = {}
    for rank, place in enumerate(found):
        ranks.setdefault(key(place), []).append(rank)
    return ranks


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
