"""The native core, or why this installation does not have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

reason = ""
"""Error of the import; empty if the core is there."""

if TYPE_CHECKING:
    # Code that needs the core is reached only where it is there: it is None otherwise.
    import gpudist._native as native
else:
    try:
        import gpudist._native as native
    except ImportError as error:
        native, reason = None, str(error)
