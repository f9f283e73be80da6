"""Extract the operator and the partition from the label of an operation."""

from __future__ import annotations

import re
from functools import lru_cache

_LIST = r"\[[\d, ]*\]"
_DTYPE = r"torch\.(?:bool|b?float\d\w*|u?int\d+|complex\d+)\b"
_DTYPE_OR_SIZE = re.compile(rf" of (?:{_DTYPE}|\d+ (?:bytes|cells))")
_MEMBERS = re.compile(rf"\s\w+{_LIST} on (\([\d, ]*\))")
_PARTITION = re.compile(
    rf"(?: on ({_LIST})| ({_LIST} -> {_LIST})|( over axes {_LIST}) of ({_LIST}))(?: of {_LIST})?"
)
_WORKERS = re.compile(r"(?: over| to| of) (\d+)(?: workers)?$")
_SHAPE = re.compile(rf"(?: of)? {_LIST}")
_JOINED = re.compile(r"( \+ |, then )")


@lru_cache(maxsize=4096)
def operator_and_partition(label: str) -> tuple[str, str]:
    """Return operator and partition of a label, without shapes and dtypes.

    ``"halo_exchange on [1, 2] of [4, 6] of torch.float32"`` becomes
    ``("halo_exchange", "[1, 2]")``. The partition is empty if the label has none. For operations
    that move together, each name is listed once, and the partition is that of the first.
    """
    parts = _JOINED.split(label)
    pairs = [_of_one(part) for part in parts[::2]]
    names = [pairs[0][0]]
    for joint, (name, _) in zip(parts[1::2], pairs[1:], strict=True):
        if name not in names:
            names += [joint, name]
    return "".join(names), next((where for _, where in pairs if where), "")


def _of_one(label: str) -> tuple[str, str]:
    label = _DTYPE_OR_SIZE.sub("", label)
    members = _MEMBERS.search(label)
    if members is not None:
        return label[: members.start()].rstrip(":"), members[1]
    partition = _PARTITION.search(label)
    if partition is not None:
        on, between, axes, grid = partition.groups()
        before, after = label[: partition.start()], label[partition.end() :]
        name = _SHAPE.sub("", before) + (axes or "") + _SHAPE.sub("", after)
        return name, on or between or grid
    label = _SHAPE.sub("", label)
    workers = _WORKERS.search(label)
    return label, f"[{workers[1]}]" if workers is not None else ""
