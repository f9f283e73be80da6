"""The site stays short, and its summary of the evidence agrees with the pages it summarizes."""

from __future__ import annotations

import pytest

from tests.docs.count import site_pages, words
from tests.docs.pages import ROOT

WORDS = 33_500
WORDS_OF_A_PAGE = 2_500
# Texts of docs/evidence.md, and the page that each is from.
QUOTED = {
    "120 right, 0 refused, 0 failed, 0 wrong": "tests/zoo/RESULTS.md",
    "727 experiments": "tests/faults/RESULTS.md",
    "0 lost, 0 hung, 0 wrong, 0 late": "tests/faults/RESULTS.md",
    "26 of 28": "benchmarks/beside/RESULTS.md",
    "3.7e-16": "benchmarks/RESULTS.md",
    "98.69 %": "benchmarks/RESULTS.md",
    "0.324": "benchmarks/NETWORKS.md",
}


def test_the_site_without_the_reference_is_short() -> None:
    sizes = {page.relative_to(ROOT).as_posix(): words(page) for page in site_pages()}
    assert len(sizes) > 30
    assert sum(sizes.values()) <= WORDS, "shorten a page, or describe details beside the code"
    assert {page: size for page, size in sizes.items() if size > WORDS_OF_A_PAGE} == {}


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_summary_is_that_of_the_full_page(quoted: str) -> None:
    summary, page = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("docs/evidence.md", QUOTED[quoted])
    )
    assert quoted in summary and quoted in page
