"""The pages of the documentation that need a released client of others, run as they stand there (`make interop`)."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, Reader, build
from tests.interop.test_eventmesh import classpath
from tests.interop.test_worterbuch_js import program
from tests.interop.test_zbuspy import python
from tests.support.chromium import find_browser, shown

__all__ = ["classpath", "program", "python"]  # fixtures: where the clients were installed


@pytest.fixture
def readers() -> Iterator[list[Reader]]:
    everybody: list[Reader] = []
    yield everybody
    for reader in everybody:
        reader.close()


def follow(readers: list[Reader], reader: Reader, page: str) -> None:
    readers.append(reader)
    reader.follow(ROOT / page)


@pytest.mark.interop
def test_a_reader_of_the_javascript_tutorial_can_do_what_it_says(
    program: Path, readers: list[Reader], tmp_path: Path
) -> None:
    reader = Reader(tmp_path)
    reader.use(program, "node_modules")
    follow(readers, reader, "docs/tutorials/javascript.md")


@pytest.mark.interop
def test_a_reader_of_the_zbus_tutorial_can_do_what_it_says(python: Path, readers: list[Reader], tmp_path: Path) -> None:
    follow(readers, Reader(tmp_path, str(python)), "docs/tutorials/zbus.md")


@pytest.mark.interop
def test_a_reader_of_the_eventmesh_tutorial_can_do_what_it_says(
    classpath: str, readers: list[Reader], tmp_path: Path
) -> None:
    reader = Reader(tmp_path)
    (tmp_path / "classpath").write_text(classpath, encoding="utf-8")
    follow(readers, reader, "docs/tutorials/eventmesh.md")


@pytest.mark.interop
def test_the_page_of_the_dashboard_shows_the_values_in_a_browser(readers: list[Reader], tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no browser is installed (Debian: apt-get install chromium)")
    reader = Reader(tmp_path)
    follow(readers, reader, "docs/recipes/dashboard.md")
    url = f"http://{reader.address('worterbuch')}/"
    text = shown(browser, tmp_path, url, "plant/line1/temp", "plant/line2/temp", "plant/line3/temp")
    rows = dict(line.split("\t") for line in text.splitlines() if "\t" in line)
    assert rows == {"plant/line1/temp": "22", "plant/line2/temp": "19", "plant/line3/temp": "18.5"}


@pytest.mark.interop
def test_the_built_pages_can_be_searched_from_a_folder(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None or importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no browser or no MkDocs is installed")
    site = tmp_path / "site"
    build(site)
    assert "matching documents" in shown(browser, tmp_path, f"{site.as_uri()}/index.html?q=flush", "matching documents")
