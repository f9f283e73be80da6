"""Values that no caller should pass, and how many of them to try."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

# `make fuzz-input` asks for more.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))

_odd = st.sampled_from(
    [
        None, True, False, -1, 0, 2**31, 2**63, 2**100, 0.5, 1.0, math.nan, math.inf, -math.inf,
        "", "1", "²", b"1", (), [], {}, object(), 1j, np.int64(1), np.float32(1.0),
        np.array([]), torch.tensor(1), torch.tensor(1.5), torch.tensor([1, 2]), torch.float32, int,
    ]
)  # fmt: skip
values: st.SearchStrategy[Any] = _odd | st.integers(-3, 5) | st.text(max_size=4)


def lists_of_anything() -> st.SearchStrategy[Any]:
    """Lists of small integers with odd values among them, and values that are not lists."""
    return (
        st.lists(st.integers(-2, 4), max_size=5)
        | st.lists(values, max_size=4)
        | st.lists(st.integers(0, 3), unique=True).map(tuple)
        | values
    )
