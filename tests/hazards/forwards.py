"""All entries, by name: importing the files of forwards registers them."""

from __future__ import annotations

from tests.hazards import (
    forwards_gradients,
    forwards_images,
    forwards_indexing,
    forwards_other_dims,
    forwards_spectral,
    forwards_state,
    forwards_structure,
    forwards_tokens,
    forwards_views,
)
from tests.hazards.entries import ENTRIES

FILES = (
    forwards_gradients, forwards_images, forwards_indexing, forwards_other_dims, forwards_spectral,
    forwards_state, forwards_structure, forwards_tokens, forwards_views,
)  # fmt: skip

__all__ = ["ENTRIES", "FILES"]
