"""Write what the documentation takes from the code: `python docs/tables.py`. A test compares it.

The tables of docs/settings.md and docs/metrics.md, and the tree of packages in CONTRIBUTING.md.
"""

import ast
import inspect
import re
from pathlib import Path

import msgspec

from babelbus import config
from babelbus.metrics import Metrics

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "docs" / "settings.md"
METRICS = ROOT / "docs" / "metrics.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def settings_tables() -> str:
    """Return a heading and a table for each section of the configuration, with a row for each setting."""
    rows: dict[str, list[str]] = {}
    for setting in config.describe():
        meaning = setting.doc.replace("[", "\\[")  # no link
        row = f"| `{setting.key}` | {setting.type} | `{setting.default}` | {meaning} |"
        rows.setdefault(setting.key.partition(".")[0], []).append(row)
    sections = {field.name: field.type for field in msgspec.structs.fields(config.Config)}
    lines = []
    for name, found in rows.items():
        sentence = (inspect.getdoc(sections[name]) or "").partition("\n")[0]
        lines += [f"### `[{name}]`", "", re.sub(r" \(docs/[^)]*\)", "", sentence), ""]
        lines += ["| key | value | default | what it is for |", "| --- | --- | --- | --- |", *found, ""]
    return "\n".join(lines[:-1])


def metrics_table() -> str:
    """Return a row for each metric."""
    lines = ["| metric | type | labels | what it tells |", "| --- | --- | --- | --- |"]
    lines += [f"| `{one.name}` | {one.type} | {', '.join(one.labels)} | {one.doc} |" for one in Metrics().describe()]
    return "\n".join(lines)


def packages_tree() -> str:
    """Return a line for each package below `src`: its name and what the first line of its docstring says."""
    lines = ["```"]
    for file in sorted((ROOT / "src").rglob("__init__.py")):
        depth = len(file.relative_to(ROOT).parts) - 3
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        sentence = re.sub(r" \(docs/[^)]*\)", "", doc.partition("\n")[0]).rstrip(".")
        lines.append(f"{'  ' * depth + file.parent.name + '/':<18} {sentence}")
    return "\n".join([*lines, "```"])


def filled(page: str, **parts: str) -> str:
    """Return `page` with each part as it is now between its two marks."""
    for name, part in parts.items():
        begin, end = f"<!-- {name}: made by docs/tables.py -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"there are no marks for {name}"
        page = before + begin + part + end + after
    return page


def pages() -> dict[Path, str]:
    """Return the pages that have such parts, as they should be."""
    parts = {
        SETTINGS: {"settings": settings_tables()},
        METRICS: {"metrics": metrics_table()},
        CONTRIBUTING: {"packages": packages_tree()},
    }
    return {page: filled(page.read_text(encoding="utf-8"), **part) for page, part in parts.items()}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
        print(path.name)
