"""``gpudist env``: show the capabilities of this installation and machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from gpudist.cli.command import print_json
from gpudist.cli.tables import print_table, print_text
from gpudist.world.environment import Environment, TransportState, describe
from gpudist.world.links import GpuLink


def run(arguments: argparse.Namespace) -> int:
    """Print the environment."""
    environment = describe()
    if arguments.json:
        print_json(asdict(environment))
        return 0
    print_table(rows(environment))
    for warning in environment.warnings:
        print_text(f"warning: {warning}")
    return 0


def rows(environment: Environment) -> list[tuple[str, str]]:
    """Return the rows of a table: name and description of each part of the environment."""
    cuda = environment.cuda
    needs = [("  needs", f"{cuda.needs}, for kernels of CUDA {cuda.compiler}")] if cuda else []
    return [
        ("gpudist", environment.gpudist),
        ("Python", environment.python),
        ("torch", _torch(environment)),
        ("native core", "built" if environment.native_core else environment.native_core_missing),
        ("CUDA half", _cuda(environment)),
        *needs,
        ("GPUs", _devices(environment)),
        ("NCCL", _nccl(environment)),
        *[("link", _link(link)) for link in environment.links],
        ("transport", f"{environment.transport}: {environment.transport_reason}"),
        *[
            (f"  {state.name}", _state(state, environment.nccl_missing))
            for state in environment.transports
        ],
    ]


def _torch(environment: Environment) -> str:
    cuda = f"built for CUDA {environment.torch_cuda}" if environment.torch_cuda else "without CUDA"
    oldest, newest = environment.tested_torch
    where = "within" if environment.torch_is_tested else "outside"
    return f"{environment.torch}, {cuda}, {where} the tested {oldest} to {newest}"


def _cuda(environment: Environment) -> str:
    cuda = environment.cuda
    if cuda is None:
        return "not built"
    driver = f"driver for CUDA up to {cuda.driver}" if cuda.driver else "no driver"
    seen = f"no GPU ({cuda.error})" if cuda.error else f"GPUs: {cuda.devices}"
    return f"built with CUDA {cuda.compiler}, {driver}, {seen}"


def _devices(environment: Environment) -> str:
    gpus = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB" for gpu in environment.devices]
    return "; ".join(gpus) or "none that torch sees"


def _link(link: GpuLink) -> str:
    words = f" ({link.words})" if link.words else ""
    return f"GPU {link.first} to GPU {link.second}: {link.kind}{words}"


def _state(state: TransportState, nccl_missing: str) -> str:
    if state.works:
        return f"works, {state.reason}"
    # The reason is printed in full a few lines above.
    reason = "NCCL is missing, see above" if state.reason == nccl_missing else state.reason
    return f"does not work: {reason}"


def _nccl(environment: Environment) -> str:
    nccl = environment.nccl
    if nccl is None:
        return f"none: {environment.nccl_missing}"
    features = f"; {', '.join(nccl.features)}" if nccl.features else ""
    return f"{nccl.version}, {nccl.path} ({nccl.found}){features}"
