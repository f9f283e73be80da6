"""References of docstrings, such as :func:`init`, as plain code on the pages of the reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Rewrites them before the docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
