"""The pattern language, case by case and against the two ways in which the specification writes it down."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.access import SERVER
from babelbus.core.router import Router
from babelbus.protocols.sbus.patterns import PREFIX_MAX, SbusPattern, key_of, subject_of
from tests.support.sbus_cases import CASES

some_bytes = st.lists(st.sampled_from([b"a", b"b", b"*", b"/", b"\xc3", b"\xa9", b"\n"]), max_size=8).map(b"".join)


def matches(pattern: bytes, key: bytes) -> bool:
    return SbusPattern(pattern).matches(subject_of(key))


def by_the_rules(pattern: bytes, key: bytes) -> bool:
    """Rules 1 to 7 of section 4.1, byte by byte."""
    if not pattern:
        return True
    at = position = 0
    while position < len(key):
        if at == len(pattern):
            return pattern.endswith(b"/")
        if pattern[at] == key[position]:
            at, position = at + 1, position + 1
        elif pattern[at : at + 1] == b"*":
            slash = key.find(b"/", position)
            at, position = at + 1, len(key) if slash < 0 else slash
        else:
            return False
    return at == len(pattern)


def by_the_expression(pattern: bytes, key: bytes) -> bool:
    """The regular expression of section 4.1, for keys without `*`."""
    if not pattern:
        return True
    parts = [rb"(?=.)[^/]*(?=/|\Z)" if part == b"*" else re.escape(part) for part in re.findall(rb"(?s).", pattern)]
    ending = b".*" if pattern.endswith(b"/") else b""
    return re.fullmatch(b"(?s:" + b"".join(parts) + ending + b")", key) is not None


def test_there_are_111_cases() -> None:
    assert len(CASES) == 111


@pytest.mark.parametrize(("pattern", "key", "expected"), CASES)
def test_a_key_matches_as_the_reference_says(pattern: str, key: str, expected: bool) -> None:
    assert matches(pattern.encode(), key.encode()) is expected
    assert by_the_rules(pattern.encode(), key.encode()) is expected


@given(some_bytes, some_bytes)
def test_matching_by_elements_is_the_same_as_byte_by_byte(pattern: bytes, key: bytes) -> None:
    assert matches(pattern, key) is by_the_rules(pattern, key)


@given(some_bytes, some_bytes.map(lambda key: key.replace(b"*", b"c")))
def test_keys_without_a_star_match_as_the_regular_expression_says(pattern: bytes, key: bytes) -> None:
    assert matches(pattern, key) is by_the_expression(pattern, key)


@given(st.lists(some_bytes, max_size=6), some_bytes)
def test_the_router_finds_what_matches(patterns: list[bytes], key: bytes) -> None:
    router = Router()
    made = [router.add(SbusPattern(pattern), lambda events: None, principal=SERVER) for pattern in patterns]
    found = {made.index(one) for one in router.find(subject_of(key))}
    assert found == {number for number, pattern in enumerate(patterns) if matches(pattern, key)}


@given(some_bytes, some_bytes)
def test_every_key_that_matches_has_the_elements_of_its_pattern(pattern: bytes, key: bytes) -> None:
    compiled, subject = SbusPattern(pattern), subject_of(key)
    if compiled.matches(subject):
        elements = subject.split("/")
        depth = 0
        while (wanted := compiled.element(depth)) is not None:
            text, whole = wanted
            assert elements[depth] == text if whole else elements[depth].startswith(text)
            depth += 1
        assert len(elements) > depth if compiled.rest else len(elements) == depth
        assert compiled.literal in (None, subject)
    else:
        assert compiled.literal != subject


def test_the_beginning_of_an_element_is_cut_between_letters_and_when_it_is_long() -> None:
    assert SbusPattern("a/é*".encode()[:-2] + b"*").element(1) == ("", False)
    assert SbusPattern(b"\xff*").element(0) == ("\udcff", False)
    assert SbusPattern(b"x" * (PREFIX_MAX + 1) + b"*").element(0) == ("x" * PREFIX_MAX, False)


@given(st.binary().map(lambda key: key.replace(b"\0", b"")))
def test_every_key_has_a_subject_and_leaves_as_the_same_bytes(key: bytes) -> None:
    assert key_of(subject_of(key)) == key


@pytest.mark.parametrize("subject", ["a\0b", "\ud800"])
def test_a_subject_that_no_key_can_express_has_none_and_matches_nothing(subject: str) -> None:
    assert key_of(subject) is None
    assert not SbusPattern(b"").matches(subject)


def test_long_keys_of_strangers_are_compared_quickly() -> None:
    pattern, key = SbusPattern(b"a" * 200_000 + b"*"), b"a" * 400_000
    assert all(pattern.matches_key(key) for _ in range(1000))
