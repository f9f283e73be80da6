"""Measure the planner's figures on one GPU: ``python -m benchmarks.gpu.profile FILE``.

``gpudist bench profile`` starts several ranks and measures their links too.
"""

from __future__ import annotations

import sys

import gpudist
from gpudist.planning import measured_profile


def main(path: str) -> None:
    measured_profile(gpudist.init(), "one GPU").save(path)
    print(f"the profile is in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
