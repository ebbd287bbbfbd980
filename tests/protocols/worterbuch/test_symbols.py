"""Keys and patterns of operators that chose other characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.state.patterns import check_key
from babelbus.protocols.worterbuch.names import USUAL, Symbols

DOTS = Symbols(".", "*", ">")
SWAPPED = Symbols("#", "/", "?")
texts = st.text("ab./?#*>", max_size=8)


def test_the_usual_characters_translate_nothing() -> None:
    assert USUAL.usual
    assert not DOTS.usual
    for text in ("a/?/#", "", "#/?", "a.b"):
        assert USUAL.read(text) == USUAL.write(text) == text


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("a.b", "a/b"),
        ("a", "a"),
        ("", ""),
        (".a..", "/a//"),
        ("a.*", "a/?"),
        ("a.>", "a/#"),
        ("*.>", "?/#"),
        (">.a", "#/a"),
        ("a*.b>", "a*/b>"),
        ("a?.b#", "a?/b#"),
    ],
)
def test_keys_and_patterns_are_translated_both_ways(theirs: str, ours: str) -> None:
    assert DOTS.read(theirs) == ours
    assert DOTS.write(ours) == theirs


@pytest.mark.parametrize("text", ["a/b", "/", "a.?", "?", "#", "a.#.b"])
def test_what_would_read_as_something_else_here_is_refused(text: str) -> None:
    assert DOTS.read(text) is None


@pytest.mark.parametrize("key", ["a.b", ".", "a/*", "*", ">/a"])
def test_a_key_that_the_chosen_characters_cannot_express_is_not_sent(key: str) -> None:
    assert DOTS.write(key) is None


@pytest.mark.parametrize(("theirs", "ours"), [("a#b", "a/b"), ("a#/", "a/?"), ("?", "#"), ("a?#/b", None)])
def test_the_usual_characters_may_have_other_meanings(theirs: str, ours: str | None) -> None:
    assert SWAPPED.read(theirs) == ours


@given(texts, st.sampled_from([DOTS, SWAPPED, USUAL]))
def test_what_can_be_translated_comes_back_as_it_was(text: str, symbols: Symbols) -> None:
    inside, outside = symbols.read(text), symbols.write(text)
    assert inside is None or symbols.write(inside) == text
    assert outside is None or symbols.read(outside) == text


@given(texts)
def test_a_wildcard_stays_one(text: str) -> None:
    inside = DOTS.read(text)
    wildcards = {"*", ">"} & set(text.split("."))
    assert inside is None or (check_key(inside) is not None) is bool(wildcards)


@pytest.mark.parametrize(
    "chosen", [("", "?", "#"), ("/", "/", "#"), ("//", "?", "#"), ("é", "?", "#"), ("\n", "a", "b")]
)
def test_separator_and_wildcards_are_three_different_ascii_characters(chosen: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError):
        Symbols(*chosen)
