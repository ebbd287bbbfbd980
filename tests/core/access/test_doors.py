"""All callers of the core say for whom they call; a forgotten principal is nobody, and never the server itself."""

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
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if any(calls(path))}
    assert found == set()


def defaults(path: Path) -> Iterator[str]:
    """Yield the defaults of the parameters of a module's functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            given = [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
            yield from map(ast.unparse, given)


def test_no_parameter_is_the_server_unless_it_is_said() -> None:
    powerful = {"SERVER", "CLIENT", "ADMIN"}
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if powerful & set(defaults(path))}
    assert found == set()
