"""The words of the pages (docs/writing.md): no sentence hides its subject, no phrase that readers stumbled over."""

import re
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT

# The specifications and the design papers are texts of others; the writers' page quotes what it forbids.
OTHERS = ("docs/specifications/", "docs/design/", "docs/writing.md", "CHANGELOG.md")
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if not str(page.relative_to(ROOT)).startswith(OTHERS)
)
TEXTS = sorted(
    str(file.relative_to(ROOT)) for file in [*ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/**/*.yaml")]
)

SENTENCE = re.compile(r"(?:\A|[.!?:] +|\n\n(?:[-*] |\d\. )?\**)(?:What|Who|Whoever) (?!(?:happens|to|it does)\b)")
PHRASES = re.compile(
    r"\b(?:as a rule|at last|nobody's|how many-th|shall not|in vain|the same holds|who may what|let in may|"
    r"is not part of|are servers of their own|there no more|goes there|does so by itself|an option of ours|"
    r"as ever|is let in|its own matter|by heart)\b"
)
LONGEST_SENTENCE = 60
"""Words. A sentence of a page has up to 25; no sentence of a table or list is bounded."""


def prose(page: str) -> str:
    """Return the text of a page without its code, tables and headings."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(?:[|#<>]|    ).*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_of_a_page_hides_its_subject(page: str) -> None:
    text = prose(page)
    found = [text[match.start() : match.end() + 60].strip() for match in SENTENCE.finditer(text)]
    assert found == []


@pytest.mark.parametrize("page", [*PAGES, *TEXTS])
def test_no_phrase_that_readers_stumbled_over(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [
        text[match.start() - 30 : match.end() + 30] for match in re.finditer(PHRASES.pattern.replace(" ", r"\s+"), text)
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_longer_than_a_breath(page: str) -> None:
    paragraphs = [
        " ".join(part.split()) for part in prose(page).split("\n\n") if not part.lstrip().startswith(("-", "*"))
    ]
    sentences = [one for part in paragraphs for one in re.split(r"(?<=[.!?:;])\s", part)]
    assert [one for one in sentences if len(one.split()) > LONGEST_SENTENCE] == []


def test_every_text_is_looked_at() -> None:
    assert Path(ROOT / "docs" / "index.md").is_file()
    assert {"README.md", "CONTRIBUTING.md", "docs/groups.md", "docs/protocols/zbus.md"} <= set(PAGES)
