"""gpudist uses no name that the oldest torch allowed lacks, but where it asks for it first."""

from __future__ import annotations

import json

import pytest

from tests.compatibility import ROOT, oldest_allowed
from tests.oldest_torch import LIST, SOURCES, missing

NAMES: dict[str, str] = json.loads(LIST.read_text())
LISTED = {space: {*names.split()} for space, names in NAMES.items() if space != "version"}


def test_the_list_is_of_the_oldest_torch() -> None:
    oldest = oldest_allowed((ROOT / "pyproject.toml").read_text())
    assert NAMES["version"].startswith(f"{oldest}."), f"see {missing.__module__}"


def test_the_oldest_torch_has_every_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{use}"
        for path in SOURCES
        for use in missing(path.read_text(), LISTED)
    ]
    assert not found, (
        "\n".join(found) + "\nask hasattr first; if the oldest torch has the name, write the list "
        "anew with it, as tests/oldest_torch.py says"
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("y = torch.Tensor.const_data_ptr", ["2: torch.Tensor.const_data_ptr"]),
        ("def f(x: torch.Tensor):\n    return x.const_data_ptr()",
         ["3: torch.Tensor.const_data_ptr"]),
        ("def f(x: torch.Tensor | None):\n    return x.const_data_ptr()",
         ["3: torch.Tensor.const_data_ptr"]),
        ("def f(x: torch.Tensor):\n    return x.data_ptr() + x.grad.shape[0]", []),
        ("names = ['data_ptr', 'const_data_ptr']", ["2: torch.Tensor.const_data_ptr, as text"]),
        ("y = torch._foreach_clone([])", ["2: torch._foreach_clone"]),
        ("if hasattr(torch, '_foreach_clone'):\n    y = torch._foreach_clone([])", []),
        ("y = getattr(torch.Tensor, 'const_data_ptr', None)", []),
        ("for name in ['const_data_ptr']:\n    if hasattr(torch.Tensor, name):\n        pass", []),
        ("from torch.nn import functional, later", ["2: torch.nn.later"]),
        ("import torch.nn.functional as F\ny = F.relu, F.later", ["3: torch.nn.functional.later"]),
        ("y = torch.hub.load",
         ["2: torch.hub is not in oldest_torch.json; write it anew with that torch"]),
    ],
)  # fmt: skip
def test_names_are_found(source: str, found: list[str]) -> None:
    assert [*missing(f"import torch\n{source}", LISTED)] == found
