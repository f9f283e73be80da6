"""Replay messages on a fat tree in SimGrid: JSON on standard input, JSON on standard output.

A program of its own, since the Python that has SimGrid may not be the one that has torch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# Bytes share links fairly; no protocol limits a flow, and acknowledgements cost nothing.
SETTINGS = (
    "--cfg=network/model:CM02", "--cfg=network/TCP-gamma:1e15", "--cfg=network/crosstraffic:0",
    "--log=root.thresh:error",
)  # fmt: skip
LATENCY_S = 1e-9


def main() -> int:
    from simgrid import (  # pyright: ignore[reportMissingImports]
        Actor,
        ClusterCallbacks,
        Comm,
        Engine,
        FatTreeParams,
        Link,
        NetZone,
    )

    work: dict[str, Any] = json.load(sys.stdin)
    engine = Engine(["replay", *SETTINGS])

    def host_of(zone: Any, coordinates: Any, number: int) -> tuple[Any, None]:
        host = zone.create_host(f"rank {number}", 1e9)
        host.seal()
        return host.netpoint, None

    tree = FatTreeParams(*work["tree"])
    callbacks = ClusterCallbacks(host_of, None, None)
    both_ways = Link.SharingPolicy.SPLITDUPLEX
    NetZone.create_fatTree_zone(
        "tree", None, tree, callbacks, work["bytes_per_s"], LATENCY_S, both_ways
    ).seal()
    hosts = [engine.host_by_name(f"rank {number}") for number in range(work["ranks"])]
    ended: list[float] = []

    def post() -> None:
        messages = work["messages"]
        Comm.wait_all([Comm.sendto_async(hosts[a], hosts[b], n) for a, b, n in messages])
        ended.append(Engine.clock)

    Actor.create("post", hosts[0], post)
    engine.run()
    print(json.dumps({"seconds": ended[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
