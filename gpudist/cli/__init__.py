"""Command ``gpudist``, also ``python -m gpudist``. Each subcommand is a file."""

from gpudist.cli.main import main

__all__ = ["main"]
