"""Suggest remedies for a world on GPUs that is incorrect, slow, or cannot be joined."""

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
from gpudist.world.links import GpuLink
from gpudist.world.partition import Partition

Key = TypeVar("Key", bound=Hashable)

# Share of the median speed of all links; slower links are reported.
SLOW_LINK = 0.5
_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of one node send through the host's memory",
    "NCCL_SHM_DISABLE": "ranks of one node without a direct path send through the network",
    "NCCL_IB_DISABLE": "nodes send through sockets, and not by InfiniBand or RoCE",
}
# Parts of NCCL's error messages when a world cannot be joined, and their remedies.
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
class RankEnvironment:
    """Host, GPU and NCCL of a rank.

    Attributes:
        node, gpu: numbers that identify the node and the GPU.
        nccl: version of NCCL, as 22705 for 2.27.5; 0 if it is not used.
        number: index of the GPU among those that the rank sees.
        off: paths that the rank's environment switches off, one bit each.
        unreachable: GPUs whose memory the rank's GPU cannot reach, one bit each.
    """

    node: int
    gpu: int
    nccl: int = 0
    number: int = 0
    off: int = 0
    unreachable: int = 0


def rank_environments(P_world: Partition) -> list[RankEnvironment]:
    """Return the environment of every rank. Collective."""
    rows = P_world.allgather_data(astuple(_environment_here(P_world)))
    return [RankEnvironment(*(int(number) for number in row)) for row in rows]


def _environment_here(P_world: Partition) -> RankEnvironment:
    said = runtime.variables("NCCL_")
    off = [said.get(name, "0") not in ("", "0") for name in _OFF]
    environment = RankEnvironment(
        _number(socket.gethostname()), _number(f"process {P_world.rank}"), _nccl_number(P_world),
        off=_bits(off),
    )  # fmt: skip
    if P_world.device.type != "cuda":
        return environment
    mine = P_world.device.index or 0
    gpu = torch.cuda.get_device_properties(mine)
    identity = str(getattr(gpu, "uuid", "")) or f"{environment.node} {mine}"
    unreachable = [
        other != mine and not torch.cuda.can_device_access_peer(mine, other)
        for other in range(torch.cuda.device_count())
    ]
    return replace(environment, gpu=_number(identity), number=mine, unreachable=_bits(unreachable))


def _bits(flags: Sequence[bool]) -> int:
    return sum(flag << number for number, flag in enumerate(flags))


def _nccl_number(P_world: Partition) -> int:
    nccl = describe().nccl if P_world.transport == "nccl" else None
    if nccl is None:
        return 0
    major, minor, patch = (int(part) for part in nccl.version.split("."))
    return 10000 * major + 100 * minor + patch


def _number(text: str) -> int:
    return int.from_bytes(digest_of(text.encode())[:6], "big")


def remedies_of(
    environments: Sequence[RankEnvironment], speeds: Sequence[LinkSpeed], links: Sequence[GpuLink]
) -> list[str]:
    """Return remedies for the environments and speeds of all ranks, most important first."""
    remedies = [
        f"Ranks {_join(ranks)} share one GPU and take turns on it: start no more processes on a "
        f"node than it has GPUs."
        for ranks in _ranks_by(
            environments, lambda environment: (environment.node, environment.gpu)
        ).values()
        if len(ranks) > 1
    ]
    versions = _ranks_by(environments, lambda environment: environment.nccl)
    if len(versions) > 1:
        words = [f"{nccl_version(v)} on ranks {_join(ranks)}" for v, ranks in versions.items()]
        remedies.append(f"NCCL is {'; '.join(words)}: install one version on all nodes.")
    wrong = [f"{speed.first}-{speed.second}" for speed in speeds if not speed.right]
    if wrong:
        remedies.append(
            f"Bytes were wrong between ranks {', '.join(wrong)}: try NCCL_P2P_DISABLE=1, and if "
            f"that is right, look for IOMMU or ACS between those GPUs, and a newer driver."
        )
    return remedies + _path_remedies(environments) + _link_remedies(environments, speeds, links)


def _path_remedies(environments: Sequence[RankEnvironment]) -> list[str]:
    """Return remedies for required paths that the environment or the machine disables."""
    remedies: list[str] = []
    nodes = len({environment.node for environment in environments})
    for bit, (name, effect) in enumerate(_OFF.items()):
        ranks = [
            rank for rank, environment in enumerate(environments) if environment.off >> bit & 1
        ]
        if ranks and (nodes > 1 if name == "NCCL_IB_DISABLE" else nodes < len(environments)):
            remedies.append(f"{name} is set on ranks {_join(ranks)}, so that {effect}: unset it.")
    used = {(environment.node, environment.number) for environment in environments}
    for rank, environment in enumerate(environments):
        numbers = range(environment.unreachable.bit_length())
        blocked = [
            number
            for number in numbers
            if environment.unreachable >> number & 1 and (environment.node, number) in used
        ]
        if blocked:
            remedies.append(
                f"GPU {environment.number} of rank {rank} cannot reach the memory of GPUs "
                f"{_join(blocked)}, so that messages go through the host: `nvidia-smi topo -p2p "
                f"r` says why; often it is IOMMU or ACS of the PCIe switches, or a virtual machine."
            )
    return remedies


def _link_remedies(
    environments: Sequence[RankEnvironment], speeds: Sequence[LinkSpeed], links: Sequence[GpuLink]
) -> list[str]:
    """Return remedies for links slower than others of their kind, in a node or between nodes."""
    remedies: list[str] = []
    if not all(environment.nccl for environment in environments):
        return remedies  # Without NCCL, the links of the GPUs are not used.
    for inside in (True, False):
        alike = [
            s
            for s in speeds
            if inside == (environments[s.first].node == environments[s.second].node)
        ]
        if len(alike) < 2:
            continue
        usual = median(speed.gbps for speed in alike)
        for speed in alike:
            if speed.gbps < SLOW_LINK * usual:
                how = kind_of(speed, environments, links)
                remedies.append(
                    f"Ranks {speed.first} and {speed.second} exchange {speed.gbps:.1f} GB/s, where "
                    f"{usual:.1f} are usual{f', over {how}' if how else ''}: cut tensors so that "
                    f"neighbours are on faster links, or see why this one is slow, by "
                    f"{'`nvidia-smi nvlink -s`' if inside else 'NCCL_DEBUG=INFO'}."
                )
    return remedies


def kind_of(
    speed: LinkSpeed, environments: Sequence[RankEnvironment], links: Sequence[GpuLink]
) -> str:
    """Return the kind of link between the GPUs of two ranks, empty if it is unknown."""
    a, b = environments[speed.first], environments[speed.second]
    if a.node != b.node:
        return "the network"
    numbers = sorted((a.number, b.number))
    return next((x.kind for x in links if [x.first, x.second] == numbers), "")


def failure_remedy(text: str) -> str:
    """Return a remedy for the error ``text`` of joining a world; empty if none is known."""
    lower = text.lower()
    return next((remedy for words, remedy in _SAID.items() if words in lower), "")


def _ranks_by(
    environments: Sequence[RankEnvironment], key: Callable[[RankEnvironment], Key]
) -> dict[Key, list[int]]:
    ranks: dict[Key, list[int]] = {}
    for rank, environment in enumerate(environments):
        ranks.setdefault(key(environment), []).append(rank)
    return ranks


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
