"""The words of docstrings (docs/design/style.md, "Prose"): standard first verbs, no sentence that hides its subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "babelbus"

# Verbs that begin the docstring of a function or method; add a verb only if no other one fits.
VERBS = """
    Acknowledge Add Answer Append Begin Build Call Cancel Check Close Collect Connect Continue Convert Count Create
    Decode Delete Deliver Disconnect Drop Encode End Fetch Find Flush Follow Handle Import Keep List Load Lock Mask
    Measure Move Open Parse Print Publish Raise Read Receive Record Refuse Register Reject Release Remove Repair
    Replace Resume Return Run Send Set Show Start Stop Subscribe Update Wait Write Yield
"""
NOUN_PHRASES = {"property", "cached_property", "setter", "overload"}
SENTENCE = re.compile(r"(?:\A|[.!?]\s+|\n\n\s*)(?:What|Who|Whoever|Do the same)\b")
PHRASES = re.compile(r"\b(?:as a rule|is none|nobody's matter|by heart)\b".replace(" ", r"[\s#]+"))

FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted({path.relative_to(PACKAGE).parts[0] for path in FILES})


def files(room: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(PACKAGE).parts[0] == room]


def entry(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(PACKAGE.parent.parent)}:{line}: {text.strip()}"


def other_verbs(room: str) -> Iterator[str]:
    for path in files(room):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
            text = ast.get_docstring(node)
            if text and not decorators & NOUN_PHRASES and re.split(r"\W", text)[0] not in VERBS.split():
                yield entry(path, node.body[0].lineno, text)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of attributes too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def other_words(room: str) -> Iterator[str]:
    for path in files(room):
        yield from (entry(path, line, text) for line, text in texts(path) if SENTENCE.search(text))
        source = path.read_text(encoding="utf-8")
        for match in PHRASES.finditer(source):
            yield entry(path, source.count("\n", 0, match.start()) + 1, match[0])


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_of_functions_begin_with_a_verb_of_the_list(room: str) -> None:
    offenders = list(other_verbs(room))
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize("room", ROOMS)
def test_no_sentence_hides_its_subject(room: str) -> None:
    offenders = list(other_words(room))
    assert not offenders, "\n".join(offenders)


def test_every_verb_of_the_list_is_used() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in FILES)
    assert {verb for verb in VERBS.split() if f'"""{verb} ' not in source} == set()
