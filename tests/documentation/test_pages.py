"""Every command and program of these pages, run as it stands there against a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, Reader

PAGES = [
    "README.md",
    "docs/start.md",
    "docs/backup.md",
    "docs/tutorials/python.md",
    "docs/tutorials/sbus.md",
    "docs/tutorials/http.md",
    "docs/recipes/work-queue.md",
    "docs/recipes/request-reply.md",
    "docs/recipes/dashboard.md",
    "docs/recipes/event-sourcing.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/concepts/*.md")),
]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    somebody = Reader(tmp_path)
    yield somebody
    somebody.close()


@pytest.mark.parametrize("page", PAGES)
def test_a_reader_can_do_what_the_page_says(reader: Reader, page: str) -> None:
    reader.follow(ROOT / page)
