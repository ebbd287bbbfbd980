"""Roots: which names are roots, and that names go in and come out unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.access import InvalidAccessError, Principal
from babelbus.core.access.root import ROOT_BYTES_MAX, UNROOTED, InvalidRootError, check_root, root_of

names = st.text(st.sampled_from("abé/ #?$!*"), max_size=12)
roots = st.lists(st.text(st.sampled_from("abé "), min_size=1), min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize("name", ["a", "tenants/acme", "a b", "é", "a" * ROOT_BYTES_MAX])
def test_a_root_is_a_path_of_plain_elements(name: str) -> None:
    check_root(name)
    Principal("acme", root=name).check()


@pytest.mark.parametrize(
    "name",
    ["", "/", "a/", "/a", "a//b", "a/#", "?", "a/?/b", "a*", "$state", "a/$x", "!/cred", "{name}", "a,b", "a\nb",
     "\ud800", "é" * ROOT_BYTES_MAX],
)  # fmt: skip
def test_other_names_are_no_roots(name: str) -> None:
    with pytest.raises(InvalidRootError):
        check_root(name)
    with pytest.raises(InvalidAccessError):
        Principal("acme", root=name).check()


@given(roots, names)
def test_a_name_comes_out_as_it_went_in(name: str, subject: str) -> None:
    check_root(name)
    root = root_of(name)
    if not subject or subject.startswith(UNROOTED):
        assert root.absolute(subject) == subject
        assert not root.contains(subject)
    else:
        assert root.contains(root.absolute(subject))
        assert root.relative(root.absolute(subject)) == subject
        assert root.absolute(subject).split("/")[: len(name.split("/"))] == name.split("/")


@given(roots, roots, names)
def test_no_name_reaches_below_another_root(one: str, other: str, subject: str) -> None:
    mine, others = root_of(one), root_of(other)
    if not (mine.prefix.startswith(others.prefix) or others.prefix.startswith(mine.prefix)):
        assert not others.contains(mine.absolute(subject))


@given(roots, names)
def test_a_subject_outside_keeps_its_name(name: str, subject: str) -> None:
    root = root_of(name)
    if not root.contains(subject):
        assert root.relative(subject) == subject


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no right to read 'a/b/x'", "no right to read 'x'"),
        ('topics a/b/x, a/b/y and "a/b/z"', 'topics x, y and "z"'),
        ("'a/b/a/b/x'", "'a/b/x'"),
        ("'data/b/x' of (data/b/y)", "'data/b/x' of (data/b/y)"),
        ("byte 3 of topics/a%2Fb%2Fnews/0/00.log", "byte 3 of topics/news/0/00.log"),
        ("topics/data%2Fb%2Fnews", "topics/data%2Fb%2Fnews"),
    ],
)
def test_a_message_has_whole_names_without_the_root(text: str, told: str) -> None:
    assert root_of("a/b").relative_text(text) == told
