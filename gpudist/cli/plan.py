"""``gpudist plan``: find a fast partition of a network, before any worker is started."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from gpudist.cli.command import print_json
from gpudist.cli.progress import Progress
from gpudist.cli.tables import print_columns, print_text
from gpudist.errors import ShapeError
from gpudist.pictures.draw import require_picture, save
from gpudist.planning.advice import Advice, plan
from gpudist.planning.hardware import Profile, profile_of
from gpudist.planning.picture import picture_of
from gpudist.planning.table import (
    MEMORY_HEADING,
    MESSAGE_HEADING,
    TIME_HEADING,
    choice,
    evidence,
    facts,
    memory_rows,
    message_rows,
    time_rows,
)


def run(arguments: argparse.Namespace) -> int:
    """Print the best partitions."""
    if arguments.output is not None:
        require_picture(arguments.output)
    profile = profile_of(arguments.profile)
    network = _network(arguments.network)
    # Rehearsals of all partitions give the same warnings, from lines that are not the user's.
    with warnings.catch_warnings(record=True) as caught:
        advice = plan(
            network, arguments.shape, arguments.ranks, profile,
            best=arguments.best, replicate_parameters=not arguments.one_owner,
            optimizer_slots=arguments.optimizer_slots, every_rank=arguments.every_rank,
            progress=Progress(),
        )  # fmt: skip
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"gpudist plan: warning: {text}", file=sys.stderr)
    if arguments.output is not None:
        words = f"{arguments.network}, {arguments.shape} on {arguments.ranks} ranks, {profile.name}"
        save(picture_of(advice, words), arguments.output)
    if arguments.json:
        print_json([{**facts(one), **evidence(advice, profile)} for one in advice])
    else:
        _show(advice, profile)
    return 0


def _show(advice: Sequence[Advice], profile: Profile) -> None:
    for heading, rows in (
        (TIME_HEADING, time_rows(advice)),
        (MESSAGE_HEADING, message_rows(advice)),
        (MEMORY_HEADING, memory_rows(advice)),
    ):
        print_columns(heading, rows)
        print()
    print_text(choice(advice))
    print_text(f"Times are predictions from: {profile.source}.")
    for kind, names in evidence(advice, profile).items():
        if names:
            print_text(f"{kind.capitalize()}: {', '.join(names)}.")
    if not all(one.is_total for one in advice):
        print_text("<= is a bound, as if all ranks sent as much as the busiest; see --every-rank.")


def _network(name: str) -> Any:
    """Import ``module:name``, and call it if it is a function or a class."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    # A user's module may raise any exception during its import.
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise ShapeError(f"--network {name}: {words}; give it as MODULE:NAME") from error
    finally:
        sys.path.remove("")
    made = found if isinstance(found, (nn.Module, list, tuple)) else _called(name, found)
    layers: Any = [made] if isinstance(made, nn.Module) else made
    if not isinstance(layers, (list, tuple)) or not all(isinstance(x, nn.Module) for x in layers):
        raise ShapeError(
            f"--network {name} is {type(made).__name__}, not a torch module or a list of layers"
        )
    return made


def _called(name: str, make: Any) -> Any:
    try:
        return make()
    except Exception as error:
        raise ShapeError(
            f"--network {name}: called without arguments, it fails: {error}"
        ) from error
