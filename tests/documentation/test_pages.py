"""Every command and program of these pages, run as it stands there against a real server."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, Reader, blocks

PAGES = {
    "README.md",
    "docs/start.md",
    "docs/backup.md",
    "docs/protocols/jebp.md",
    "docs/protocols/sbus.md",
    "docs/python-client.md",
    "docs/python-client-state.md",
    "docs/tutorials/python.md",
    "docs/tutorials/sbus.md",
    "docs/tutorials/http.md",
    "docs/recipes/work-queue.md",
    "docs/recipes/request-reply.md",
    "docs/recipes/dashboard.md",
    "docs/recipes/event-sourcing.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/concepts/*.md")),
}


ELSEWHERE = {
    "docs/access-recipes.md": "tests/access/test_recipes.py",
    "docs/pipeline.md": "tests/spark/test_pages.py",
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


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_reader_can_do_what_the_page_says(reader: Reader, page: str) -> None:
    reader.follow(ROOT / page)


OURS = ("docs/design/", "docs/specifications/")
"""Pages for those who change Babelbus: their Python shows how our own sources look."""


def test_every_page_with_commands_or_programs_is_run_by_a_test() -> None:
    pages = {str(page.relative_to(ROOT)): blocks(page) for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}
    with_commands = {name for name, steps in pages.items() if any(step.language == "sh" for step in steps)}
    with_programs = {
        name
        for name, steps in pages.items()
        if any(step.language == "python" for step in steps) and not name.startswith(OURS)
    }
    assert (with_commands | with_programs) - {*PAGES, *ELSEWHERE, "docs/writing.md"} == set()


def test_the_test_that_the_page_of_the_client_shows_passes(tmp_path: Path) -> None:
    (shown,) = [block for block in blocks(ROOT / "docs/python-client.md") if block.title.startswith("test_")]
    (tmp_path / shown.title).write_text(shown.text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    plugins = (
        [] if "babelbus" in {entry.name for entry in entry_points(group="pytest11")} else ["babelbus.testing.plugin"]
    )
    done = subprocess.run(
        [*command, *(part for plugin in plugins for part in ("-p", plugin)), shown.title],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout
