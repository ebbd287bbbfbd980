"""The documentation says what the code does; what can be compared is compared."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_tables_of_settings_and_metrics_are_complete() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert page == tables.filled(page), "run: .venv/bin/python docs/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_every_dependency_is_explained_and_pinned() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = {re.split(r"[<>=;]", entry)[0].strip() for entry in re.findall(r'"([A-Za-z][\w.-]*[<>=][^"]*)"', text)}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    explained = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")

    def plain(name: str) -> str:
        return name.lower().replace("_", "-")

    assert "aiohttp" in names
    assert {plain(name) for name in names} - {plain(name) for name in pinned} == set()
    assert {name for name in names if f"| {name} |" not in explained} == set()
