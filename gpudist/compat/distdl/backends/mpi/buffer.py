"""Buffer managers: accepted everywhere, and not needed."""

from __future__ import annotations


class MPIBufferManager:
    """Argument ``buffer_manager`` of DistDL's layers; gpudist manages its buffers itself."""
