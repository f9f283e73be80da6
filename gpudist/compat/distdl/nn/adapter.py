"""Base of the classes that translate DistDL's arguments into those of a layer of gpudist."""

from __future__ import annotations

from typing import Any


class Adapter:
    """Class to name before the layer among the bases of a class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
