"""Records and events as principals with a root see them: subjects without the root, offsets and all else unchanged."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import babelbus.core.broker
import babelbus.core.fanout
import babelbus.core.publish
import babelbus.core.router
import babelbus.core.state.editor
import babelbus.core.state.rooted_editor
import babelbus.core.topic
from babelbus.core.access.root import root_of
from babelbus.core.record import Event
from babelbus.core.rooted import absolute_batch, relative_chunk, relative_event
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_batch
from babelbus.records.record import Headers, Record

ROOT = root_of("tenants/acme")
SUBJECT = b"ce_subject"

headers = st.lists(
    st.tuples(
        st.sampled_from([SUBJECT, b"dead-topic", b"other"]),
        st.sampled_from([None, b"", b"news/x", b"tenants/acme/news/x", b"tenants/globex/news/x"]),
    ),
    max_size=3,
).map(tuple)
records = st.builds(
    Record,
    st.one_of(st.none(), st.binary(max_size=20), st.just(b"tenants/acme/")),
    st.sampled_from([None, b"", b"key", b"tenants/acme/key"]),
    headers,
    st.integers(1, 2**40),
)


def stored(runs: list[tuple[int, list[Record]]]) -> bytes:
    """Records in the stored form, with gaps between the runs."""
    parts, offset = [], 0
    for gap, run in runs:
        offset += gap
        parts.append(bytes(encode_batch(run, offset).data))
        offset += len(run)
    return b"".join(parts)


def plainly(value: bytes | None) -> bytes | None:
    return None if value is None else value.removeprefix(b"tenants/acme/")


def relative(given: Headers) -> Headers:
    return tuple((name, value if name == b"other" else plainly(value)) for name, value in given)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(records, min_size=1, max_size=4)), min_size=1, max_size=4))
def test_names_in_stored_records_lose_the_root_and_nothing_else_changes(runs: list[tuple[int, list[Record]]]) -> None:
    data = stored(runs)
    made = relative_chunk(data, ROOT)
    before, after = list(iterate(decode_chunk(data))), list(iterate(decode_chunk(made)))
    assert [one.offset for one in after] == [one.offset for one in before]
    assert [(one.payload, one.timestamp, one.attributes) for one in after] == [
        (one.payload, one.timestamp, one.attributes) for one in before
    ]
    assert [one.key for one in after] == [plainly(one.key) for one in before]
    assert [one.headers for one in after] == [relative(one.headers) for one in before]
    assert len(made) <= len(data)


def test_a_chunk_without_the_root_is_passed_on_as_it_is() -> None:
    data = stored([(0, [Record(b"x", None, ((SUBJECT, b"news/x"),), 1)])])
    assert relative_chunk(data, ROOT) is data


@given(st.lists(records, min_size=1, max_size=4))
def test_what_a_client_sends_comes_back_as_it_was(sent: list[Record]) -> None:
    kept = [one for one in sent if b"tenants" not in b"".join(value or b"" for _, value in one.headers)]
    kept = [Record(one.payload, b"key", one.headers, one.timestamp) for one in kept] or [Record(b"", b"key", (), 1)]
    data = bytes(encode_batch(kept, 0).data)
    came = relative_chunk(absolute_batch(data, "news", ROOT), ROOT)
    assert [(one.payload, one.key, one.headers) for one in iterate(decode_chunk(came))] == [
        (one.payload, one.key, one.headers) for one in kept
    ]


def test_a_subject_below_the_topic_becomes_absolute_and_another_stays_a_header() -> None:
    data = bytes(encode_batch([Record(b"", None, ((SUBJECT, name),), 1) for name in (b"news/x", b"else/x")], 0).data)
    made = list(iterate(decode_chunk(absolute_batch(data, "news", ROOT))))
    assert [one.headers for one in made] == [((SUBJECT, b"tenants/acme/news/x"),), ((SUBJECT, b"else/x"),)]


@pytest.mark.parametrize("data", [b"", b"ce_subject", b"ce_subject" * 20])
def test_records_with_a_fault_stay_for_whoever_refuses_them(data: bytes) -> None:
    assert absolute_batch(data, "news", ROOT) == data


def test_the_key_of_an_event_is_relative_if_it_is_the_subject() -> None:
    subject = "tenants/acme/a"
    made = [relative_event(Event(subject, b"", key), ROOT) for key in (None, subject.encode(), b"key")]
    assert [(one.subject, one.key) for one in made] == [("a", None), ("a", b"a"), ("a", b"key")]


HOT = (babelbus.core.broker, babelbus.core.fanout, babelbus.core.publish, babelbus.core.router, babelbus.core.topic)


@pytest.mark.parametrize("module", HOT, ids=lambda module: module.__name__)
def test_the_path_of_a_publication_knows_no_roots(module: object) -> None:
    """A principal without a root must not pay for those that have one: protocols translate at their edges."""
    path = getattr(module, "__file__", None)
    assert isinstance(path, str)
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names.isdisjoint({"root", "absolute", "relative", "Root"})


def test_no_method_of_the_editor_of_the_state_calls_another_that_translates() -> None:
    """Else the keys of a rooted principal would get the root twice."""
    classes: dict[str, ast.ClassDef] = {}
    for module in (babelbus.core.state.editor, babelbus.core.state.rooted_editor):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    translating = {
        node.name
        for node in classes["RootedStateEditor"].body
        if isinstance(node, functions) and not node.name.startswith("_")
    }
    called = {
        node.func.attr
        for node in ast.walk(classes["StateEditor"])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    }
    assert called.isdisjoint(translating)
    own = {node.name for node in classes["StateEditor"].body if isinstance(node, functions)}
    keyed = {name for name in own if not name.startswith("_")} - {"commit", "check_key", "ends", "read_pattern"}
    assert keyed == translating
