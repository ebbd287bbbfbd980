"""The site is built as `make docs` builds it, with warnings as errors, and asks no other server for anything."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, build

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="MkDocs is not installed: pip install 'babelbus[docs]'",
)
LOADED = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)|<link[^>]*\shref=\"?([^\s\">]+)[^>]*stylesheet")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


def test_every_page_of_the_folder_is_built(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in ROOT.glob("docs/**/*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert pages - built == set()


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = [one or other for one, other in LOADED.findall(page.read_text(encoding="utf-8"))]
        assert loaded
        assert [url for url in loaded if "://" in url or url.startswith("//")] == [], page


def test_the_python_reference_has_the_docstrings(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("publish_many", "OutcomeUnknownError", "psubscribe"):
        assert name in page
