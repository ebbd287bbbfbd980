"""Keys and patterns: every row of sections 2.1, 2.2, 2.4 and 10 of the specification."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.state.patterns import (
    PatternFault,
    check_key,
    check_parent_pattern,
    check_pattern,
    children_pattern,
    covers,
    size_fault,
    store_pattern,
    subscription_pattern,
)
from babelbus.protocols.worterbuch.translator import PATTERN_CODES

elements = st.lists(st.sampled_from(["a", "b", "", "?", "#", "a?", "$SYS"]), min_size=1, max_size=4)
paths = elements.map("/".join)
keys = st.lists(st.sampled_from(["a", "b", "", "a?"]), min_size=1, max_size=4).map("/".join)
patterns = st.builds(
    lambda parts, last: "/".join([*parts, *last]) or "#",
    st.lists(st.sampled_from(["a", "b", "", "?"]), max_size=3),
    st.sampled_from([["#"], [], ["a"]]),
)


def code_of(fault: PatternFault | None) -> int | None:
    return None if fault is None else PATTERN_CODES[fault]


def test_bytes_and_elements_of_a_key_are_bounded() -> None:
    for fits in ("x" * 5000, "ü" * 2500, "/" * 1023, ""):
        assert size_fault(fits, 5000) is None
    assert size_fault("/" * 1024, 5000) == "has more than 1,024 elements"
    for over in ("x" * 5001, "ü" * 2500 + "x", "\ud800" * 1667, "/" * 5001):
        assert size_fault(over, 5000) == "has more than 5,000 bytes (state.key_bytes_max)"


@pytest.mark.parametrize("key", ["a", "a/b", "a//b", "/a", "a/", "/", "", "a?", "#1", "x#y/?z", "$SYS/x", "a/..", "*"])
def test_keys_without_an_element_that_is_a_wildcard_are_keys_and_patterns(key: str) -> None:
    assert check_key(key) is None
    assert check_pattern(key) is None
    assert check_parent_pattern(key) is None


@pytest.mark.parametrize(
    ("text", "as_key", "as_pattern", "as_parent"),
    [
        ("?", 0, None, None),
        ("a/?/b", 0, None, None),
        ("a/?", 0, None, None),
        ("#", 1, None, 1),
        ("a/#", 1, None, 1),
        ("a/#/b", 1, 1, 1),
        ("#/", 1, 1, 1),
        ("?/#", 0, None, 1),
        ("#/?", 1, 1, 1),
        ("#/#", 1, 1, 1),
        ("a?/#", 1, None, 1),
        ("a#/?", 0, None, None),
    ],
)
def test_a_wildcard_is_an_error_where_it_is_not_allowed_and_the_first_decides(
    text: str, as_key: int | None, as_pattern: int | None, as_parent: int | None
) -> None:
    assert code_of(check_key(text)) == as_key
    assert code_of(check_pattern(text)) == as_pattern
    assert code_of(check_parent_pattern(text)) == as_parent


@pytest.mark.parametrize(("pattern", "code"), [("#/a/#", 2), ("#/#", 2), ("#/a", 1), ("a/#", None)])
def test_historic_servers_had_a_code_for_a_second_multi_wildcard(pattern: str, code: int | None) -> None:
    assert code_of(check_pattern(pattern, historic=True)) == code


@pytest.mark.parametrize(
    ("pattern", "key", "stored", "awaited"),
    [
        ("a/#", "a", True, False),
        ("a/#", "a/b", True, True),
        ("a/#", "a/b/c", True, True),
        ("a/#", "a/", True, True),
        ("a/#", "ab", False, False),
        ("#", "a", True, True),
        ("#", "", True, True),
        ("#", "$SYS/version", True, True),
        ("?/#", "a", True, False),
        ("?/#", "a/b", True, True),
        ("?/#", "", True, False),
        ("?", "a", True, True),
        ("?", "", True, True),
        ("?", "$SYS", True, True),
        ("?", "a/b", False, False),
        ("a/?", "a/", True, True),
        ("a/?", "a", False, False),
        ("?/?", "/", True, True),
        ("a/?/c", "a/b/c", True, True),
        ("a/?/c", "a//c", True, True),
        ("a/?/c", "a/b", False, False),
        ("a/?/#", "a/b", True, False),
        ("a/b", "a/b", True, True),
        ("a/b", "a/B", False, False),
        ("a/b", "a/b/", False, False),
        ("a?", "ab", False, False),
        ("a?", "a?", True, True),
        ("/a", "a", False, False),
        ("", "", True, True),
    ],
)
def test_a_pattern_matches_more_in_the_store_than_in_events(
    pattern: str, key: str, stored: bool, awaited: bool
) -> None:
    assert store_pattern(pattern).matches(key) is stored
    assert subscription_pattern(pattern).matches(key) is awaited


@given(patterns, keys)
def test_the_two_rules_differ_by_the_one_key_that_has_nothing_for_the_multi_wildcard(pattern: str, key: str) -> None:
    stored, awaited = store_pattern(pattern).matches(key), subscription_pattern(pattern).matches(key)
    assert stored or not awaited
    shorter = pattern.endswith("/#") and store_pattern(pattern[:-2]).matches(key)
    assert (stored and not awaited) is shorter


@given(keys)
def test_a_key_as_a_pattern_means_itself(key: str) -> None:
    assert subscription_pattern(key).literal == key
    assert store_pattern(key).matches(key)


@pytest.mark.parametrize(
    ("granted", "requested", "covered"),
    [
        ("hello/#", "hello/x", True),
        ("hello/#", "hello/?", True),
        ("hello/#", "hello/#", True),
        ("hello/#", "hello/x/y", True),
        ("hello/#", "hello/?/#", True),
        ("hello/#", "hello", False),
        ("hello/#", "#", False),
        ("hello/#", "?/x", False),
        ("hello/?", "hello/?", True),
        ("hello/?", "hello/x", True),
        ("hello/?", "hello/", True),
        ("hello/?", "hello/#", False),
        ("hello/?", "hello", False),
        ("hello/?", "hello/x/y", False),
        ("hello/?/x", "hello/a/x", True),
        ("hello/?/x", "hello/#", False),
        ("hello", "hello", True),
        ("hello", "hello/x", False),
        ("hello", "?", False),
        ("hello", "#", False),
        ("hello/x", "hello/?", False),
        ("hello/x", "hello/#", False),
        ("?", "?", True),
        ("?", "#", False),
        ("?", "a", True),
        ("?", "", True),
        ("#", "#", True),
        ("#", "a/b", True),
        ("#", "?", True),
        ("#", "", True),
        ("?/#", "#", False),
        ("?/#", "a/#", True),
        ("?/#", "a", False),
        ("$SYS/clients/#", "$SYS/clients/id/lastWill", True),
        ("", "", True),
        ("", "a", False),
    ],
)
def test_a_granted_pattern_covers_what_section_10_says(granted: str, requested: str, covered: bool) -> None:
    assert covers(granted, requested) is covered


@given(patterns, patterns, keys)
def test_a_right_never_lets_events_through_that_it_does_not_cover(granted: str, requested: str, key: str) -> None:
    if covers(granted, requested) and subscription_pattern(requested).matches(key):
        assert covers(granted, key)


@given(paths)
def test_a_pattern_without_a_misplaced_wildcard_covers_itself(path: str) -> None:
    if check_pattern(path) is None:
        assert covers(path, path)


@pytest.mark.parametrize(("parent", "pattern"), [(None, "?"), ("", "/?"), ("a", "a/?"), ("a/?", "a/?/?")])
def test_listing_children_needs_the_right_to_all_of_them(parent: str | None, pattern: str) -> None:
    assert children_pattern(parent) == pattern
