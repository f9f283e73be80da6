"""``gpudist plan``: the best partitions of a network, before any worker is started."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from torch import nn

from gpudist.cli.command import Command, print_json
from gpudist.errors import ShapeError
from gpudist.planning.advice import plan
from gpudist.planning.hardware import BUILT_IN, profile_of
from gpudist.planning.table import facts, text


def run(arguments: argparse.Namespace) -> int:
    """Print the advice."""
    profile = profile_of(arguments.profile)
    advice = plan(
        _network(arguments.network), arguments.shape, arguments.ranks, profile,
        best=arguments.best, replicate_parameters=not arguments.one_owner,
    )  # fmt: skip
    if arguments.json:
        print_json([facts(one) for one in advice])
        return 0
    print(text(advice))
    print(f"\nTimes are predictions from: {profile.source}.")
    return 0


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
    if isinstance(found, (nn.Module, list, tuple)):
        return found
    try:
        return found()
    except TypeError as error:
        raise ShapeError(
            f"--network {name}: called without arguments, it fails: {error}"
        ) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--network", required=True, metavar="MODULE:NAME",
        help="a torch module, a list of layers, or a function that makes one")  # fmt: skip
    add("--shape", required=True, type=int, nargs="+", help="global shape of its input")
    add("--ranks", required=True, type=int, help="workers, all of which are used")
    add("--profile", default="h100",
        help=f"{', '.join(BUILT_IN)}, or a file that gpudist bench profile wrote")  # fmt: skip
    add("--best", type=int, help="partitions to plan; 8, and all of up to 4 ranks, unless given")
    add("--one-owner", action="store_true", help="every parameter on one worker, not on all")


PLAN = Command(
    "plan",
    "find the best partition of a network",
    "Rehearse a training step of a network on every Cartesian partition of its input, and print "
    "the best with messages, memory and predicted times. No other process is started and no tensor "
    "is made.",
    add_arguments,
    run,
)
