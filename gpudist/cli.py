"""The command ``gpudist``, also ``python -m gpudist``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from gpudist.environment import Environment, describe
from gpudist.planning.command import add_plan_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status."""
    parser = argparse.ArgumentParser(
        "gpudist", description="Model parallelism for PyTorch, by data movements."
    )
    commands = parser.add_subparsers(title="commands", required=True)
    env = commands.add_parser("env", help="show what this installation and machine can do")
    env.add_argument("--json", action="store_true", help="for programs")
    env.set_defaults(run=show_environment)
    add_plan_parser(commands)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def show_environment(arguments: argparse.Namespace) -> int:
    environment = describe()
    if arguments.json:
        print(json.dumps(asdict(environment), indent=2))
        return 0
    print_table(rows(environment))
    for warning in environment.warnings:
        print(f"warning: {warning}")
    return 0


def rows(environment: Environment) -> list[tuple[str, str]]:
    """A line each: what, and what of it."""
    torch = f"built for CUDA {environment.torch_cuda}" if environment.torch_cuda else "without CUDA"
    return [
        ("gpudist", environment.gpudist),
        ("Python", environment.python),
        ("torch", f"{environment.torch}, {torch}"),
        ("native core", "built" if environment.native_core else environment.native_core_missing),
        ("CUDA half", _cuda(environment)),
        ("GPUs", _devices(environment)),
        ("NCCL", _nccl(environment)),
        ("transport", f"{environment.transport}: {environment.transport_reason}"),
    ]


def print_table(lines: Sequence[tuple[str, str]]) -> None:
    """In colour on a terminal, where rich is installed."""
    width = max(len(name) for name, _ in lines)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            for name, text in lines:
                styled = Text.assemble((name.ljust(width), "bold cyan"), "  ", text)
                Console(soft_wrap=True).print(styled)
            return
    for name, text in lines:
        print(f"{name:<{width}}  {text}")


def _cuda(environment: Environment) -> str:
    cuda = environment.cuda
    if cuda is None:
        return "not built"
    driver = f"driver for CUDA up to {cuda.driver}" if cuda.driver else "no driver"
    seen = f"no GPU ({cuda.error})" if cuda.error else f"GPUs: {cuda.devices}"
    return f"built with CUDA {cuda.runtime}, {driver}, {seen}"


def _devices(environment: Environment) -> str:
    found = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB" for gpu in environment.devices]
    return "; ".join(found) or "none that torch sees"


def _nccl(environment: Environment) -> str:
    nccl = environment.nccl
    if nccl is None:
        return f"none: {environment.nccl_missing}"
    features = f"; {', '.join(nccl.features)}" if nccl.features else ""
    return f"{nccl.version}, {nccl.path} ({nccl.found}){features}"
