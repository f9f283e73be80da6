"""All entries, by name: importing the files of forwards registers them."""

from __future__ import annotations

from tests.hazards import (
    forwards_algebra,
    forwards_gradients,
    forwards_images,
    forwards_indexing,
    forwards_modules,
    forwards_other_dims,
    forwards_python,
    forwards_selection,
    forwards_spectral,
    forwards_spellings,
    forwards_state,
    forwards_structure,
    forwards_tokens,
    forwards_transforms,
    forwards_views,
    forwards_writes,
)
from tests.hazards.entries import ENTRIES

FILES = (
    forwards_algebra, forwards_gradients, forwards_images, forwards_indexing, forwards_modules,
    forwards_other_dims, forwards_python, forwards_selection, forwards_spectral,
    forwards_spellings, forwards_state, forwards_structure, forwards_tokens,
    forwards_transforms, forwards_views, forwards_writes,
)  # fmt: skip

__all__ = ["ENTRIES", "FILES"]
