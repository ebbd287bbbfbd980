"""Every command and program of these pages, run as it stands there against a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, Reader, blocks

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


ELSEWHERE = {
    "docs/access-recipes.md": "tests/access/test_recipes.py",
    "docs/recipes/parquet.md": "tests/spark/test_pages.py",
    "docs/tutorials/javascript.md": "tests/interop/test_pages.py",
    "docs/tutorials/zbus.md": "tests/interop/test_pages.py",
    "docs/tutorials/eventmesh.md": "tests/interop/test_pages.py",
}
"""Pages that another test runs."""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    somebody = Reader(tmp_path)
    yield somebody
    somebody.close()


@pytest.mark.parametrize("page", PAGES)
def test_a_reader_can_do_what_the_page_says(reader: Reader, page: str) -> None:
    reader.follow(ROOT / page)


def test_every_page_with_commands_is_run_by_a_test() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    with_commands = {
        str(page.relative_to(ROOT)) for page in pages if any(block.language == "sh" for block in blocks(page))
    }
    assert with_commands - {*PAGES, *ELSEWHERE, "docs/writing.md"} == set()
