"""Parse the command line, run the subcommand, and report wrong usage in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from textwrap import fill

from gpudist.cli.commands import COMMANDS
from gpudist.cli.progress import erase_line, write_line
from gpudist.errors import GpudistError
from gpudist.version import __version__

MISTAKE, INTERRUPTED, CUT_OFF = 2, 130, 141


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Formatter that shows defaults, fills paragraphs, and leaves indented examples alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if part.startswith(" ") else fill(part, width, initial_indent=indent)
            for part in text.split("\n\n")
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required or action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status.

    0: success. 1: the command found an error. 2: wrong usage. 130: interrupted. 141: the reader of
    the output closed it.
    """
    top = parser()
    parsed = top.parse_args(arguments)
    if parsed.command is None:
        top.print_help()
        return 0
    try:
        # Torch takes seconds to load, the first time even minutes.
        write_line("" if "torch" in sys.modules else "gpudist: loading torch")
        command = import_module(f"gpudist.cli.{parsed.command}")
        erase_line()
        status = command.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Otherwise the interpreter flushes again on exit, and reports that it failed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    except (GpudistError, OSError) as error:
        erase_line()
        print(f"gpudist {parsed.command}: error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        erase_line()
        print(f"gpudist {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """Create the parser of all commands and their arguments."""
    top = argparse.ArgumentParser(
        "gpudist",
        description="Model parallelism for PyTorch, by data movements.",
        epilog="gpudist COMMAND --help describes a command and its arguments. Exit status: 0 fine, "
        "1 something is wrong, 2 called wrongly.",
    )
    top.add_argument("--version", action="version", version=f"gpudist {__version__}")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            formatter_class=_Help,
        )
        command.add_arguments(added)
        added.add_argument("--json", action="store_true", help="print JSON for programs")
    return top
