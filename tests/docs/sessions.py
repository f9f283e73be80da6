"""A page's files and commands as one shell session, as its reader would type them."""

from __future__ import annotations

import doctest
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.docs.pages import Block

# Before the output of each command.
MARK = "=== output of the next command ==="
COMPARED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_session(
    blocks: Sequence[Block], folder: Path, environment: Mapping[str, str], limit_s: float
) -> dict[str, str]:
    """Save the files and run the commands of ``blocks``, in order, and compare what they print.

    Returns:
        What each command printed.

    Raises:
        AssertionError: a command failed, or printed something else than the page shows.
    """
    script = folder / ".session.sh"
    script.write_text("\n".join(["set -e", *(_lines(block) for block in blocks), ""]))
    ended = subprocess.run(
        ["bash", str(script)], cwd=folder, env=dict(environment), timeout=limit_s,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    printed = ended.stdout.split(f"{MARK}\n")[1:]
    commands = [(block, *pair) for block in blocks for pair in block.commands]
    last = commands[max(len(printed) - 1, 0)] if commands else None
    assert ended.returncode == 0, f"{last}\n{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    for (block, command, shown), output in zip(commands, printed, strict=True):
        if shown:
            fits = doctest.OutputChecker().check_output(shown, output, COMPARED)
            assert fits, f"{block}: {command}\nis to print\n{shown}\nand printed\n{output}"
    return {command: output for (_, command, _), output in zip(commands, printed, strict=True)}


def _lines(block: Block) -> str:
    if block.file:
        return f"cat > {block.file} <<'END_OF_FILE'\n{block.text}END_OF_FILE"
    return "\n".join(f"echo '{MARK}'\n{command}" for command, _ in block.commands)
