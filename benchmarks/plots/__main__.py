"""Draw the committed results for README.md beside this file: ``python -m benchmarks.plots``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.document import RESULTS
from benchmarks.files import read
from benchmarks.plot import pictures
from benchmarks.plots.style import save

FOLDER = Path(__file__).resolve().parent
# Pictures of the page and their titles; pictures without results are omitted.
CAPTIONS = {
    "bandwidth-2": "Bus bandwidth on 2 ranks",
    "bandwidth-4": "Bus bandwidth on 4 ranks",
    "scaling": "Strong and weak scaling over 1, 2 and 4 ranks",
    "beside-halo-2": "Halo exchange on 2 ranks",
    "beside-layers-2": "Layers on 2 ranks",
    "beside-networks-2": "Training steps of whole networks on 2 ranks",
    "beside-tensor_parallel-2": "Tensor-parallel layers and a GPT on 2 ranks",
}
INTRODUCTION = """\
# Pictures of the results

`python -m benchmarks.plots` draws these pictures from
[benchmarks/results](../results/README.md), which states where each result was measured.
`gpudist bench plot FILES --output FOLDER` draws your own results. [Benchmarks](../README.md)
describes the subjects and the peers.

*Bandwidth*: the band of gpudist extends from the 10th to the 90th percentile. "MPI" is the better
of Open MPI and MPICH in each case. There are two ceilings from the same run: a plain copy of as
many bytes on all ranks at once, and one message in each direction at once into existing memory. An
operator may exceed the second one if its bytes move in one direction or stay in a cache.

*Beside the peers*: gpudist's time divided by the peer's, on a logarithmic axis. Left of the dashed
line, gpudist is faster. Open circles are bounds rather than peers: they do less, or do not
communicate. Lines are 95 % intervals, for results with samples.
"""


def page(names: list[str]) -> str:
    """Return the page that shows these pictures."""
    shown = [f"## {CAPTIONS[name]}\n\n![{CAPTIONS[name]}]({name}.svg)\n" for name in names]
    return "\n".join([INTRODUCTION, *shown])


def main() -> None:
    """Write the page, and the pictures as SVG."""
    figures = pictures(read(RESULTS))
    names = [name for name in CAPTIONS if name in figures]
    for name in names:
        save(figures[name], name, FOLDER, ("svg",))
    (FOLDER / "README.md").write_text(page(names), encoding="utf-8")


if __name__ == "__main__":
    main()
