"""Compare the behaviour of two checkouts, before and after rooms and names change.

Run ``python -m tests.frozen record build/frozen`` in one checkout, then ``python -m tests.frozen
compare build/frozen`` in another, with the same torch on the same machine. Differences are printed,
and the exit status is then 1. Only public names are used, so that the two checkouts may have
different rooms.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.frozen import checkpoints, layers, movements, names, plans

# Records of each of these, one key per line.
PARTS: dict[str, Callable[[int, Path, bool], dict[str, Any]]] = {
    "plans": plans.record,
    "movements": movements.record,
    "layers": layers.record,
    "names": names.record,
    "checkpoints": checkpoints.record,
}
ALIKE: dict[str, Callable[[Any, Any], bool]] = {"names": names.accepts, "layers": layers.are_alike}
COUNTS = {"plans": 2000, "movements": 2000, "layers": 600}


def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    options.folder.mkdir(parents=True, exist_ok=True)
    is_first = options.what == "record"
    differing = 0
    for part in options.parts:
        file = options.folder / f"{part}.json"
        known = {} if is_first else json.loads(file.read_text())
        count = known.pop("count", None) or options.count or COUNTS.get(part, 0)
        found = json.loads(json.dumps(PARTS[part](count, options.folder, is_first)))
        if is_first:
            file.write_text(json.dumps({"count": count, **found}, indent=0))
            print(f"{part}: {len(found)} recorded")
            continue
        same = ALIKE.get(part, operator.eq)
        wrong = [key for key in known if key not in found or not same(known[key], found[key])]
        differing += len(wrong)
        print(f"{part}: {len(known)} compared, {len(wrong)} differ")
        for key in wrong[:20]:
            print(f"  {key}\n    was {known[key]}\n    is  {found.get(key)}")
        for key in sorted(set(found) - set(known)):
            print(f"  new: {key}")
    return 1 if differing else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--count", type=int, help="of plans, movements and layers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
