"""Which names a topic may have, which subjects a pattern wants, and which topic records a subject."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core import subject as subjects
from babelbus.core.subject import (
    EVERYTHING,
    NAME_BYTES_MAX,
    PathPattern,
    TopicTable,
    below,
    check_topic_name,
    exactly,
    may_hold_secrets,
)
from babelbus.errors import InvalidTopicNameError

elements = st.text("abc", min_size=1, max_size=2)
paths = st.lists(elements, min_size=1, max_size=5).map("/".join)


@pytest.mark.parametrize(
    "name", ["a", "a/b", "größe", ".", "..", "$state", "a b", "#1", "x" * NAME_BYTES_MAX, "ä" * 124]
)
def test_a_topic_may_have_any_name_without_comma_and_control_characters(name: str) -> None:
    check_topic_name(name)


@pytest.mark.parametrize(
    "name", ["", "x" * (NAME_BYTES_MAX + 1), "ä" * 125, "a,b", "a\nb", "a\x00", "\x7f", "\x85", "\ud800", "a\udfff"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidTopicNameError):
        check_topic_name(name)


@pytest.mark.parametrize(
    ("pattern", "wanted", "others"),
    [
        (exactly("a/b"), ["a/b"], ["a", "a/b/c", "a/c", "b"]),
        (below("a"), ["a/b", "a/b/c"], ["a", "ab", "b/a"]),
        (PathPattern(("a", None)), ["a/b", "a/c"], ["a", "a/b/c", "b/c"]),
        (PathPattern((None, "b"), rest=True), ["a/b/c", "x/b/c/d"], ["a/b", "a/c/b"]),
        (EVERYTHING, ["a", "a/b"], []),
    ],
)
def test_a_pattern_matches_what_it_says(pattern: PathPattern, wanted: list[str], others: list[str]) -> None:
    assert all(pattern.matches(subject) for subject in wanted)
    assert not any(pattern.matches(subject) for subject in others)


@given(paths)
def test_a_pattern_without_wildcards_is_one_subject(path: str) -> None:
    assert exactly(path).literal == path
    assert exactly(path).matches(path)
    assert below(path).literal is None


@given(st.sets(paths, max_size=6), paths)
def test_the_topic_with_the_longest_name_in_front_records_a_subject(names: set[str], subject: str) -> None:
    table = TopicTable()
    table.replace(names)
    fitting = [name for name in names if subject == name or subject.startswith(f"{name}/")]
    for _ in range(2):  # the second time from memory
        assert table.find(subject) == max(fitting, key=len, default=None)


def test_what_the_table_remembers_ends_with_a_change_of_topics() -> None:
    table = TopicTable()
    table.replace({"a"})
    assert table.find("a/b/c") == "a"
    table.change("a/b", there=True)
    assert table.find("a/b/c") == "a/b"
    table.change("a/b", there=False)
    assert table.find("a/b/c") == "a"
    table.replace(set())
    assert table.find("a/b/c") is None


def test_subjects_that_clients_choose_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "CACHE_MAX", 4)
    table = TopicTable()
    table.replace({"a"})
    for number in range(20):
        assert table.find(f"a/{number}") == "a"
    assert len(table._cache) <= 4


@pytest.mark.parametrize(
    ("topic", "may"),
    [
        ("!", True),
        ("!/cred", True),
        ("!/cred/1/2", True),
        ("!/c", False),
        ("!/credit", False),
        ("a", False),
        ("!x", False),
    ],
)
def test_a_topic_may_hold_secret_subjects_if_some_are_below_its_name(topic: str, may: bool) -> None:
    assert may_hold_secrets(topic) is may
