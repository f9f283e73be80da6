"""Definition of subcommands, and their JSON output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """Subcommand of ``gpudist``.

    The module ``gpudist.cli.NAME``, which may load torch, is imported to run it. Its function
    ``run`` takes the parsed arguments and returns the exit status: 0, or 1 if it found an error. On
    wrong usage it raises a ``GpudistError``, which becomes status 2.

    Attributes:
        name: word after ``gpudist``.
        help: line in the list of commands.
        description: text at the start of ``--help``.
        add_arguments: function that adds the arguments other than ``--json``, which all commands
            have.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def extent(text: str) -> int:
    """Convert one number of a shape or a grid, for argparse."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number; separate numbers by spaces, as in 1 1 64 64"
        ) from None


def print_json(value: Any) -> None:
    """Print ``value`` as JSON; NaN and infinity become null."""
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
