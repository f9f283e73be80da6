"""``gpudist plan``, and ``gpudist bench profile`` that measures a machine for it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gpudist.errors import GpudistError, ShapeError
from gpudist.planning.advice import plan
from gpudist.planning.hardware import BUILT_IN, Profile, profile_of
from gpudist.planning.measuring import measured_profile
from gpudist.planning.table import facts, text
from gpudist.rank_pool import RankPool
from gpudist.runtime import init

MISTAKE = 2
_LIMIT_S = 300.0


def add_plan_parser(commands: Any) -> None:
    """Add ``plan`` to the subcommands of a parser."""
    parser = commands.add_parser(
        "plan",
        help="find the best partition of a network",
        description="Rehearse a training step of a network on every Cartesian partition of its "
        "input, and print the best with messages, memory and predicted times. No other process is "
        "started and no tensor is made.",
    )
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print for programs")
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``plan``, but for ``--json``."""
    add = parser.add_argument
    add("--network", required=True, metavar="MODULE:NAME",
        help="a torch module, a list of layers, or a function that makes one")  # fmt: skip
    add("--shape", required=True, type=int, nargs="+", help="global shape of its input")
    add("--ranks", required=True, type=int, help="workers, all of which are used")
    add("--profile", default="h100",
        help=f"{', '.join(BUILT_IN)}, or a file that gpudist bench profile wrote")  # fmt: skip
    add("--best", type=int, help="partitions to plan; 8, and all of up to 4 ranks, unless given")
    add("--one-owner", action="store_true", help="every parameter on one worker, not on all")


def run(arguments: argparse.Namespace) -> int:
    """Print the advice; exit status 2 for what cannot be planned."""
    return _without_traceback("plan", lambda: _plan(arguments))


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``bench profile``, but for ``--json``."""
    parser.add_argument("--ranks", type=int, default=2, help="processes, unless under torchrun")
    parser.add_argument("--output", type=Path, default=Path("profile.json"), help="the profile")


def run_profile(arguments: argparse.Namespace) -> int:
    """Measure this machine and write the profile; under torchrun, of all its ranks."""
    return _without_traceback("bench profile", lambda: _profile(arguments))


def _plan(arguments: argparse.Namespace) -> None:
    profile = profile_of(arguments.profile)
    advice = plan(
        _network(arguments.network), arguments.shape, arguments.ranks, profile,
        best=arguments.best, replicate_parameters=not arguments.one_owner,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps([facts(one) for one in advice], indent=2))
        return
    print(text(advice))
    print(f"\nTimes are predictions from: {profile.source}.")


def _profile(arguments: argparse.Namespace) -> None:
    P_world = init()
    if P_world.size > 1:
        profile = measured_profile(P_world)
    elif arguments.ranks < 2:
        raise ShapeError(f"a profile is measured between at least 2 ranks, not {arguments.ranks}")
    else:
        pool = RankPool(arguments.ranks, _LIMIT_S)
        try:
            found = pool.run(arguments.ranks, measured_profile, limit_s=_LIMIT_S, transport="host")
        finally:
            pool.close()
        profile: Profile = found[0]
    if P_world.rank == 0:
        profile.save(arguments.output)
        print(f"{arguments.output}: {profile.source}")


def _network(name: str) -> Any:
    """What ``module:name`` names, called if it is a function or a class."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ShapeError(f"--network {name}: {error}; give it as MODULE:NAME") from error
    finally:
        sys.path.remove("")
    if isinstance(found, nn.Module | list | tuple):
        return found
    try:
        return found()
    except TypeError as error:
        raise ShapeError(
            f"--network {name}: called without arguments, it fails: {error}"
        ) from error


def _without_traceback(command: str, body: Callable[[], None]) -> int:
    try:
        body()
    except GpudistError as error:
        print(f"gpudist {command}: error: {error}", file=sys.stderr)
        return MISTAKE
    return 0
