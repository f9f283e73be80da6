"""What a subcommand is, and how all of them print for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name: the word after ``gpudist``.
        help: one line for the list of commands.
        description: what ``--help`` begins with.
        add_arguments: adds its arguments; ``--json`` is there already.
        run: carries it out and returns the exit status: 0, or 1 where it found something wrong. A
            user's mistake is a ``GpudistError``, and ends as status 2.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def print_json(value: Any) -> None:
    """Print it for programs; what JSON has no word for is null."""
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
