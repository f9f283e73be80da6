"""Names of any type: otherwise pyright parses all files of a large package."""

from typing import Any

def __getattr__(name: str) -> Any: ...
