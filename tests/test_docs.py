"""The documentation says what the code does; what can be compared is compared."""

import ast
import importlib
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.client import BlockingClient, Client, Identity

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SNIPPET = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def test_what_the_pages_take_from_the_code_is_true() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for page, content in tables.pages().items():
        assert page.read_text(encoding="utf-8") == content, "run: .venv/bin/python docs/tables.py"


def test_every_package_says_in_one_line_what_it_is() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    rooms = [line for line in lines if re.match(r" *\w+/ ", line)]
    assert len(rooms) == len(list(ROOT.glob("src/**/__init__.py")))
    assert [line for line in rooms if len(line) > 120 or not line.split("/", 1)[1].strip()] == []


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "examples"])
def test_every_page_that_the_code_names_exists(folder: str) -> None:
    named = {
        (page, file.name)
        for file in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"docs/[\w./-]+?\.md\b", file.read_text(encoding="utf-8"))
    }
    assert [(page, file) for page, file in named if not (ROOT / page).is_file()] == []


def test_the_navigation_leads_to_every_page() -> None:
    navigation = set(re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert navigation == pages | {"changelog.md", "contributing.md", "readme.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def snippets(page: Path) -> Iterator[ast.Module]:
    """Yield the Python of a page; it may wait outside of a function."""
    for _, text in SNIPPET.findall(page.read_text(encoding="utf-8")):
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        yield compile(textwrap.dedent(text), str(page), "exec", flags)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if SNIPPET.search(page.read_text(encoding="utf-8"))], ids=lambda page: page.stem
)
def test_every_name_that_a_snippet_takes_from_the_package_exists(page: Path) -> None:
    identity = Identity.generate()
    clients: list[object] = [Client(identity=identity), BlockingClient(identity=identity)]
    states: list[object] = [client.state for client in clients]  # type: ignore[attr-defined]  # both have it
    missing: list[str] = []
    for node in [node for snippet in snippets(page) for node in ast.walk(snippet)]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "babelbus":
            module = importlib.import_module(node.module or "")
            missing += [f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
        elif isinstance(node, ast.Attribute) and page.stem.startswith("python-client"):
            owner = {"client": clients, "client.state": states, "state": states}.get(ast.unparse(node.value), ())
            if owner and not any(hasattr(one, node.attr) for one in owner):
                missing.append(ast.unparse(node))
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


def test_every_file_that_contributing_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [name for name in named if not any((top / name).exists() for top in (ROOT, ROOT / "src" / "babelbus"))] == []
