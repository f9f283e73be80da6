"""Decoders of diffusers in blocks: peak memory, bytes and time beside the naive way.

``python -m benchmarks.decoders --ranks 4 --json FILE``. The naive way gathers the latents on every
rank, which decodes all of them. Each side runs in new processes, as in
:mod:`benchmarks.network_memory`. Activations are the memory above that which is resident after a
first call, which is subtracted and reported as well: the network, and what libraries keep.
"""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpudist
from benchmarks.layers import block_of
from benchmarks.network_memory import RUN_S, status_mib
from benchmarks.worlds import NEW, ROOT
from gpudist.ops import AllGather
from gpudist.testing import run_distributed
from gpudist.world.partition import CartesianPartition, Partition
from tests.zoo.operators import declare_missing_operators

SIDES = ("sequential", "gpudist", "gathered")
LATENTS = 4
FRAMES = 3
# Latents of each rank by default.
ROWS, COLUMNS = 32, 16


def _autoencoder(name: str, *arguments: Any, **others: Any) -> nn.Module:
    declare_missing_operators()
    import diffusers  # takes seconds

    return getattr(diffusers, name)(*arguments, **others)


def _image(channels: tuple[int, ...]) -> nn.Module:
    down, up = (("DownEncoderBlock2D",) * len(channels), ("UpDecoderBlock2D",) * len(channels))
    levels = (3, 3, down, up, channels, 1)
    return _autoencoder("AutoencoderKL", *levels, norm_num_groups=4)


def _video(name: str, *, is_deep: bool) -> nn.Module:
    levels = ([1, 2, 4, 4], [False, True, True]) if is_deep else ([1, 2], [True])
    return _autoencoder(
        name,
        base_dim=8,
        z_dim=LATENTS,
        num_res_blocks=1,
        dim_mult=levels[0],
        temperal_downsample=levels[1],
    )


def _hunyuan(channels: tuple[int, ...], factor: int) -> nn.Module:
    return _autoencoder(
        "AutoencoderKLHunyuanVideo",
        latent_channels=LATENTS,
        block_out_channels=channels,
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=factor,
    )


@dataclass(frozen=True)
class Decoder:
    """An autoencoder of small width, and its latents.

    Attributes:
        deep: with eight times the height and width of its latents, as trained ones.
        flat: with twice their height and width, for many calls.
        leading: leading dims of the latents.
    """

    deep: Callable[[], nn.Module]
    flat: Callable[[], nn.Module]
    leading: tuple[int, ...]

    def latents(self, *size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(*self.leading, *size, generator=generator)

    def partition(self, P_world: Partition, *grid: int) -> CartesianPartition:
        return P_world.create_cartesian_topology_partition((1,) * len(self.leading) + grid)


VIDEO = (1, LATENTS, FRAMES)
DECODERS = {
    "AutoencoderKL": Decoder(
        partial(_image, (16, 16, 32, 32)), partial(_image, (8, 16)), (1, LATENTS)
    ),
    "AutoencoderKLWan": Decoder(
        partial(_video, "AutoencoderKLWan", is_deep=True),
        partial(_video, "AutoencoderKLWan", is_deep=False),
        VIDEO,
    ),
    "AutoencoderKLHunyuanVideo": Decoder(
        partial(_hunyuan, (8, 8, 16, 16), 8), partial(_hunyuan, (8, 8, 8, 8), 2), VIDEO
    ),
    "AutoencoderKLQwenImage": Decoder(
        partial(_video, "AutoencoderKLQwenImage", is_deep=True),
        partial(_video, "AutoencoderKLQwenImage", is_deep=False),
        VIDEO,
    ),
}


def made(make: Callable[[], nn.Module]) -> Any:
    """Return the network, equal on all ranks."""
    torch.manual_seed(0)
    return make().eval()


def distributed(network: nn.Module, P_x: CartesianPartition) -> Any:
    """Return the converted network, which splits latents that every worker has."""
    return gpudist.distribute(network, P_x, inputs={"z": "split"}, methods=("decode",))


@dataclass(frozen=True)
class Measured:
    """One rank's call.

    Attributes:
        before_mib: resident memory before the call.
        peak_mib: largest increase in the call, the result included.
        sent_bytes: bytes sent in the call.
        seconds: time of the call.
    """

    before_mib: float
    peak_mib: float
    sent_bytes: int
    seconds: float


@torch.no_grad()
def run(P_world: Partition, name: str, side: str, size: tuple[int, int]) -> Measured:
    """Measure the second call of a side."""
    torch.set_num_threads(1)
    decoder = DECODERS[name]
    latents = decoder.latents(*size)
    P_x = decoder.partition(P_world, P_world.size, 1)
    network = made(decoder.deep)
    network = distributed(network, P_x) if side == "gpudist" else network
    block = block_of(latents, P_x)
    gather = AllGather(P_x, tuple(d for d, n in enumerate(P_x.shape) if n > 1))

    def call() -> torch.Tensor:
        if side == "gpudist":
            return network.decode(latents).sample.to_local()
        return network.decode(gather(block) if side == "gathered" else latents).sample

    call()
    gc.collect()
    P_world.barrier()
    before_mib, sent = status_mib("VmRSS"), _sent_bytes(P_world)
    # Reset the peak.
    Path("/proc/self/clear_refs").write_text("5")
    start_s = time.perf_counter()
    call()
    seconds = time.perf_counter() - start_s
    peak_mib = status_mib("VmHWM") - before_mib
    return Measured(before_mib, peak_mib, _sent_bytes(P_world) - sent, seconds)


def _sent_bytes(P_world: Partition) -> int:
    return sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))


def measured(name: str, side: str, ranks: int, size: tuple[int, int]) -> list[Measured]:
    """Measure every rank of a new world, in new processes."""
    command = [sys.executable, "-m", "benchmarks.decoders", "--only", name, "--side", side]
    command += ["--ranks", str(ranks), "--size", *map(str, size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **NEW.environment}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [Measured(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    options = _options()
    size = tuple(options.size or (ROWS * options.ranks, COLUMNS))
    names = options.only or list(DECODERS)
    if options.side is not None:
        arguments = (options.ranks, names[0], options.side, size)
        found = run_distributed(run, *arguments, transport="host", timeout=RUN_S)
        print(json.dumps([asdict(one) for one in found]))
        return 0
    lines: list[dict[str, Any]] = []
    for name in names:
        sides = {
            side: measured(name, side, 1 if side == "sequential" else options.ranks, size)
            for side in SIDES
        }
        (alone,) = sides["sequential"]
        line: dict[str, Any] = {"decoder": name, "latents": size, "ranks": options.ranks}
        for side, of_ranks in sides.items():
            line[side] = {
                "peak_mib": max(one.peak_mib for one in of_ranks),
                "before_mib": max(one.before_mib for one in of_ranks),
                "sent_bytes": sum(one.sent_bytes for one in of_ranks),
                "seconds": max(one.seconds for one in of_ranks),
                "ratio": max(one.peak_mib for one in of_ranks) / alone.peak_mib,
            }
            print(
                f"{name}, latents {list(size)}, {len(of_ranks)} ranks, {side}: "
                + ", ".join(f"{key} {value:.4g}" for key, value in line[side].items()),
                flush=True,
            )
        lines.append(line)
    if options.json:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        options.json.write_text(text, encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", type=int, nargs=2, help="of the latents")
    parser.add_argument("--only", nargs="*", choices=DECODERS, help="names of decoders")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
