"""Protocols and the administration API say for whom they call the core: else it would act for the server itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "babelbus"

# Method -> how the text in front of its dot ends; each such call names a principal.
ASKED = {
    **dict.fromkeys(("create_topic", "alter_topic", "remove_topic"), ("broker",)),
    "subscribe": ("broker",),
    **dict.fromkeys(("create", "ensure", "alter", "remove"), ("groups",)),
    **dict.fromkeys(("join", "take", "seek", "pause", "resume"), ("group", "joined")),
    "add": ("responders", "router"),
    "request": ("broker",),
}
NAMES = ("principal", "client", "identity", "ADMIN", "SERVER")


def calls(path: Path) -> Iterator[ast.Call]:
    """Yield the calls of a module that the core asks about, and that name no principal."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        ends = ASKED.get(node.func.attr)
        if ends is None or not ast.unparse(node.func.value).endswith(ends):
            continue
        given = [*map(ast.unparse, node.args), *(ast.unparse(one.value) for one in node.keywords)]
        if not any(name in text for text in given for name in NAMES):
            yield node


def test_every_call_of_the_core_names_its_principal() -> None:
    files = [*(SOURCE / "protocols").rglob("*.py"), *(SOURCE / "web").rglob("*.py")]
    found = {str(path.relative_to(SOURCE)) for path in files if any(calls(path))}
    assert found == set()
