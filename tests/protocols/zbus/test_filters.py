"""Filters of tags: the examples of the specification, and the same said without regular expressions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.filters import FILTER_LENGTH_MAX, compile_filter

TABLE = [
    ("a.*", ["a.b", "a."], ["a", "a.b.c", "b.b", "xa.b"]),
    ("a.#", ["a", "a.b", "a.b.c", "a."], ["b", "ab", "xa.b"]),
    ("a.b;x", ["a.b", "x"], ["a", "b", "a.b;x", "a.b.x"]),
    ("#", ["", "a", "a.b", "a\nb"], []),
    ("*", ["", "a", "a\nb"], ["a.b"]),
    ("*.b", ["a.b", ".b"], ["b", "a.b.c"]),
    ("a.*.c", ["a.b.c"], ["a.c", "a.b.b.c"]),
    ("a.#.c", ["a", "a.x.y"], ["b"]),
    ("a*", ["a*"], ["ab", "a"]),
    ("a.b", ["a.b"], ["axb", "a.b.", "A.b"]),
    ("", [""], ["a"]),
    ("é.*", ["é.ü"], ["e.u"]),
]


@pytest.mark.parametrize(("text", "passing", "failing"), TABLE)
def test_a_tag_passes_a_filter_by_its_parts(text: str, passing: list[str], failing: list[str]) -> None:
    matches = compile_filter(text)
    assert [tag for tag in passing if not matches(tag)] == []
    assert [tag for tag in failing if matches(tag)] == []


@pytest.mark.parametrize("text", ["a", "#", "*", ""])
def test_a_message_without_a_tag_passes_no_filter(text: str) -> None:
    assert not compile_filter(text)(None)


def test_a_filter_may_be_long_and_no_longer() -> None:
    longest = "*." * (FILTER_LENGTH_MAX // 2)
    assert not compile_filter(longest)("a." * 5000 + "b")
    with pytest.raises(MalformedMessageError):
        compile_filter(longest + "a")


def slowly(text: str, tag: str) -> bool:
    return any(parts_match(group.split("."), tag.split(".")) for group in text.split(";"))


def parts_match(wanted: list[str], given: list[str]) -> bool:
    for number, part in enumerate(wanted):
        if part == "#":
            return True
        if number >= len(given) or part not in ("*", given[number]):
            return False
    return len(wanted) == len(given)


@given(st.text("ab.*#;", max_size=10), st.text("ab.*#", max_size=8))
def test_a_filter_says_what_its_definition_says(text: str, tag: str) -> None:
    assert bool(compile_filter(text)(tag)) == slowly(text, tag)
