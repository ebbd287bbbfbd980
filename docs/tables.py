"""Write what the documentation takes from the code: `python docs/tables.py`. A test compares it.

The tables of settings and metrics in docs/operations.md, and the tree of packages in CONTRIBUTING.md.
"""

import ast
import re
from pathlib import Path

from babelbus import config
from babelbus.metrics import Metrics

ROOT = Path(__file__).parent.parent
OPERATIONS = ROOT / "docs" / "operations.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def settings_table() -> str:
    """Give a row for each setting."""
    lines = ["| key | value | default | what it is for |", "| --- | --- | --- | --- |"]
    lines += [f"| `{one.key}` | {one.type} | `{one.default}` | {one.doc} |" for one in config.describe()]
    return "\n".join(lines)


def metrics_table() -> str:
    """Give a row for each metric."""
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
    operations = OPERATIONS.read_text(encoding="utf-8")
    contributing = CONTRIBUTING.read_text(encoding="utf-8")
    return {
        OPERATIONS: filled(operations, settings=settings_table(), metrics=metrics_table()),
        CONTRIBUTING: filled(contributing, packages=packages_tree()),
    }


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
        print(path.name)
