"""Names of any type: otherwise pyright parses 3,200 files of diffusers and transformers."""

from typing import Any

def __getattr__(name: str) -> Any: ...
