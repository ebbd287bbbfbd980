"""Names of keys: children and matches, against a model that looks at every key."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.state.key_index import LEAVES_MAX, KeyPattern, Names

elements = st.sampled_from(["", "a", "b", "?", "ü"])
keys = st.lists(elements, min_size=1, max_size=4).map("/".join)
patterns = st.builds(KeyPattern, st.lists(elements | st.none(), max_size=4).map(tuple), st.booleans())

Children = dict[tuple[str, ...], set[str]]


def names_of(stored: set[str]) -> Names:
    names = Names(stored)
    for key in stored:
        names.add(key)
    return names


def children_of(stored: set[str]) -> Children:
    """Node -> names of its children, of every node that there is."""
    found: Children = {(): set()}
    for key in stored:
        parts = key.split("/")
        for depth in range(len(parts)):
            found.setdefault(tuple(parts[:depth]), set()).add(parts[depth])
        found.setdefault(tuple(parts), set())
    return found


def pattern(text: str) -> KeyPattern:
    parts = text.split("/")
    rest = parts[-1] == "#"
    return KeyPattern(tuple(None if part == "?" else part for part in (parts[:-1] if rest else parts)), rest)


# docs/specifications/worterbuch.md, section 2.2, store match
@pytest.mark.parametrize(
    ("text", "key", "found"),
    [
        ("a/#", "a", True),
        ("a/#", "a/b", True),
        ("a/#", "a/b/c", True),
        ("a/#", "ab", False),
        ("a/#", "b", False),
        ("?/#", "a", True),
        ("?/#", "a/b/c", True),
        ("?/#", "", True),
        ("#", "a", True),
        ("#", "$SYS/version", True),
        ("#", "", True),
        ("?", "$SYS", True),
        ("?/version", "$SYS/version", True),
        ("?", "a/b", False),
        ("?", "", True),
        ("a/?", "a/", True),
        ("a/?", "a", False),
        ("a/?/c", "a//c", True),
        ("?/?", "/", True),
        ("/#", "/a", True),
        ("/#", "", True),
        ("/#", "a", False),
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a?", "a?", True),
        ("a?", "ab", False),
        ("#1", "#1", True),
        ("a//b", "a/b", False),
        ("A", "a", False),
    ],
)
def test_each_row_of_the_store_match(text: str, key: str, found: bool) -> None:
    assert pattern(text).matches(key) is found
    assert names_of({key, "other/key"}).match(pattern(text)).count(key) == found


@pytest.fixture(params=[1, 2, LEAVES_MAX], autouse=True, scope="module")
def leaves_max(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("babelbus.core.state.key_index.LEAVES_MAX", request.param)
        yield


@given(st.sets(keys), patterns)
def test_what_is_found_is_what_matches_of_all_keys(stored: set[str], wanted: KeyPattern) -> None:
    found = names_of(stored).match(wanted)
    assert sorted(found) == sorted(key for key in stored if wanted.matches(key))


@given(st.sets(keys), st.lists(patterns, max_size=6), st.integers(min_value=1, max_value=9))
def test_a_search_finds_each_key_with_the_first_of_several_patterns_that_means_it(
    stored: set[str], wanted: list[KeyPattern], at_once: int
) -> None:
    found: list[tuple[int, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("babelbus.core.state.key_index.NAMES_AT_ONCE", at_once)
        for _ in names_of(stored).search(wanted, found):
            pass
    meant = {key: [number for number, one in enumerate(wanted) if one.matches(key)] for key in stored}
    assert sorted(found) == sorted((numbers[0], key) for key, numbers in meant.items() if numbers)


def test_a_search_looks_at_each_name_once_however_many_patterns_mean_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("babelbus.core.state.key_index.NAMES_AT_ONCE", 1)
    names = names_of({f"a{number}/b/{number}" for number in range(100)})
    pauses = [
        len(list(names.search(wanted, [])))
        for wanted in ([pattern("?/?/?")], [pattern("?/?/?"), *(pattern(f"?/?/{number}") for number in range(1000))])
    ]
    assert pauses[0] == pauses[1]


@given(st.lists(st.tuples(st.booleans(), keys)))
def test_children_are_those_of_the_keys_left_and_what_stays_is_counted(steps: list[tuple[bool, str]]) -> None:
    stored: set[str] = set()
    names = Names(stored)
    for add, key in steps:
        before, parts = children_of(stored), tuple(key.split("/"))
        if add:
            stored.add(key)
            there = names.add(key)
            assert there == max(depth for depth in range(len(parts) + 1) if parts[:depth] in before)
        else:
            stored.discard(key)
            left = names.remove(key)
            after = children_of(stored)
            assert left == max(depth for depth in range(len(parts) + 1) if parts[:depth] in after)
        expected = children_of(stored)
        for parent, wanted in expected.items():
            assert set(names.children(parent) or []) == wanted
        for parent in before.keys() - expected.keys():
            assert names.children(parent) is None


@given(st.sets(keys), st.lists(elements | st.none(), max_size=3))
def test_children_of_several_nodes_come_once_each(stored: set[str], wanted: list[str | None]) -> None:
    nodes = [
        node
        for node in children_of(stored)
        if len(node) == len(wanted) and all(one in (None, part) for one, part in zip(wanted, node, strict=True))
    ]
    found = names_of(stored).children_matching(KeyPattern(tuple(wanted)))
    expected: set[str] = set().union(*(children_of(stored)[node] for node in nodes))
    assert sorted(found) == sorted(expected)


def test_a_node_that_does_not_exist_has_no_children_and_a_leaf_has_none() -> None:
    names = names_of({"a/b"})
    assert names.children(["x"]) is None
    assert names.children(["a", "b", "c"]) is None
    assert names.children(["a", "b"]) == []
