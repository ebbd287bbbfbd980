"""Compiled filters with their needles find what a plain evaluation of the tree finds."""

import fnmatch
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.core.access.root import root_of
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from babelbus.web.search.language import Both, Comparison, Either, Exists, Node, Not, parse
from babelbus.web.search.matching import Filter
from babelbus.web.search.scan import scan

TOPIC = "orders"
NONE = object()


def plain(node: Node, record: Record) -> bool:
    """Evaluate a tree with nothing of the compiled filter."""
    if isinstance(node, Not):
        return not plain(node.of, record)
    if isinstance(node, Both):
        return all(plain(part, record) for part in node.parts)
    if isinstance(node, Either):
        return any(plain(part, record) for part in node.parts)
    value = look_up(node.field.kind, node.field.name, node.field.parts, record)
    if isinstance(node, Exists):
        return value is not NONE
    return compare(node, value, is_text=node.field.kind != "pointer")


def look_up(kind: str, name: str, parts: tuple[str, ...], record: Record) -> Any:
    headers = {one.decode(): value for one, value in reversed(record.headers)}
    if kind == "pointer":
        try:
            value = json.loads((record.payload or b"").decode(), parse_constant=no_number)
        except ValueError:
            return NONE
        for part in parts:
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and re.fullmatch("0|[1-9][0-9]*", part) and int(part) < len(value):
                value = value[int(part)]
            else:
                return NONE
        return value
    if kind == "subject":
        subject = (headers.get("ce_subject") or b"").decode()
        return subject if subject.startswith(TOPIC + "/") else TOPIC
    data = record.key if kind == "key" else record.payload if kind == "payload" else headers.get(name)
    return NONE if data is None else data.decode("utf-8", "surrogateescape")


def no_number(text: str) -> None:
    raise ValueError(text)


def compare(test: Comparison, value: Any, *, is_text: bool) -> bool:
    wanted: Any = test.value
    operator = test.operator
    if operator == "!=":
        return not compare(Comparison(test.field, "=", wanted, test.text), value, is_text=is_text)
    is_number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
    if is_text and operator == "contains":
        text = wanted if isinstance(wanted, str) else test.text or json.dumps(wanted)
        return value is not NONE and text in value
    if is_text and is_number and value is not NONE:
        if len(value) > 40 or not re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", value, re.ASCII):
            return False
        value = json.loads(value)
    if is_text and wanted is None and operator == "=":
        return value is NONE
    if value is NONE:
        return False
    if operator == "like":
        pattern = fnmatch.translate(str(wanted).replace("[", "[[]"))
        return isinstance(value, str) and re.match(pattern, value) is not None
    if operator == "contains":
        if isinstance(value, str):
            return isinstance(wanted, str) and wanted in value
        return isinstance(value, list) and any(same(one, wanted) for one in value)
    if operator == "=":
        return same(value, wanted)
    if isinstance(value, bool) or isinstance(value, str) is not isinstance(wanted, str):
        return False
    if not isinstance(value, (str, int, float)):
        return False
    return bool({"<": value < wanted, "<=": value <= wanted, ">": value > wanted, ">=": value >= wanted}[operator])


def same(one: Any, other: Any) -> bool:
    kinds = [bool if isinstance(x, bool) else float if isinstance(x, (int, float)) else type(x) for x in (one, other)]
    return kinds[0] is kinds[1] and one == other


WORDS = st.sampled_from(
    ["a", "ab", "b/c", "ä", "\n", '"', "\\", "<img>", "10", "1e1", "true", "null", "orders/eu", "a*c"]
)
NAMES = st.sampled_from(["a", "b", "ä", "0", 'q"'])
NUMBERS = st.sampled_from([0, 1, 10, 10.0, 1.5, -2, 100, 0.1, 12345678.25, 1e300, 9007199254740993])
SCALARS = st.one_of(WORDS, NUMBERS, st.booleans(), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
FORMS = st.sampled_from(["plain", "ascii", "exponent", "decimal"])


def written(value: Any, form: str) -> bytes:
    """A value as JSON, in one of the ways in which others may write it."""
    text = json.dumps(value, ensure_ascii=form == "ascii")
    if form == "ascii":
        text = text.replace("/", "\\/").replace("a", "\\u0061") if "true" not in text and "false" not in text else text
    if form == "exponent":
        text = re.sub(r"(?<=[\[ :])(\d+)0(?=[,\]}])", r"\1e1", text)
    if form == "decimal":
        text = re.sub(r"(?<=[\[ :])(\d+)(?=[,\]}])", r"\1.000", text)
    return text.encode()


PAYLOADS = st.one_of(
    st.builds(written, VALUES, FORMS),
    WORDS.map(str.encode),
    st.binary(max_size=5),
    st.none(),
    NUMBERS.map(lambda n: b"%r" % n),
)
HEADERS = st.lists(
    st.tuples(st.sampled_from([b"x", b"ce_subject", "ä".encode()]), st.one_of(st.none(), WORDS.map(str.encode))),
    max_size=3,
).map(lambda pairs: tuple(dict(pairs).items()))
RECORDS = st.lists(
    st.builds(
        Record,
        payload=PAYLOADS,
        key=st.one_of(st.none(), WORDS.map(str.encode), st.binary(max_size=3)),
        headers=HEADERS,
        timestamp=st.integers(1, 2**40),
    ),
    min_size=1,
    max_size=12,
)
FIELDS = st.one_of(
    st.sampled_from(["key", "subject", "payload", 'headers["x"]', 'headers["ä"]', 'payload[""]']),
    st.lists(NAMES, min_size=1, max_size=2).map(lambda parts: f"payload[{json.dumps('/' + '/'.join(parts))}]"),
)
LITERALS = SCALARS.map(json.dumps)
TESTS = st.one_of(
    st.tuples(FIELDS, st.sampled_from(["=", "!=", "contains"]), LITERALS).map(" ".join),
    st.tuples(FIELDS, st.sampled_from(["<", "<=", ">", ">="]), st.one_of(WORDS, NUMBERS).map(json.dumps)).map(" ".join),
    st.tuples(FIELDS, st.just("like"), st.text("ab*?/or", max_size=5).map(json.dumps)).map(" ".join),
    FIELDS.map(lambda field: f"{field} exists"),
)
FILTERS = st.recursive(
    TESTS,
    lambda inner: st.one_of(
        inner.map(lambda one: f"not ({one})"),
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map(lambda parts: f"({''.join(parts)})"),
    ),
    max_leaves=4,
)


@settings(max_examples=500, deadline=None)
@given(FILTERS, RECORDS)
def test_a_filter_with_needles_finds_what_a_plain_evaluation_finds(text: str, records: list[Record]) -> None:
    data = bytes(encode_batch(records).data)
    node = parse(text)
    wanted = [number for number, record in enumerate(records) if plain(node, record)]
    found = scan(data, Filter(text, TOPIC), 0, len(records), len(records) + 1)
    assert found.hits == wanted
    assert (found.size_bytes, found.records, found.next_offset) == (len(data), len(records), len(records))


@pytest.mark.parametrize(
    ("literal", "payload"),
    [
        ("7777777", b'{"a":7.777777e6}'),
        ("7777777", b'{"a":7777777.000}'),
        ("7777777", b'{"a":77777770e-1}'),
        ("7777777", b'{"a":7777776.99999999999999999999999}'),
        ("0.1", b'{"a":1e-1}'),
        ("0", b'{"a":-0.0}'),
        ("1200", b'{"a":1.2E+3}'),
        ('"M\u00fcller"', b'{"a":"M\\u00fcller"}'),
        ('"M\u00fcller"', b'{"a":"\\u004d\xc3\xbcller"}'),
        ('"a/b"', b'{"a":"a\\/b"}'),
        ('"a\\"b"', b'{"a":"a\\"b"}'),
        ('"\U0001f600"', b'{"a":"\\ud83d\\ude00"}'),
        ("true", b'{"\\u0061":true}'),
    ],
)
def test_a_value_is_found_however_json_writes_it(literal: str, payload: bytes) -> None:
    data = bytes(encode_batch([Record(b"{}", timestamp=1), Record(payload, timestamp=1)]).data)
    wanted = Filter(f"/a = {literal}", TOPIC)
    assert scan(data, wanted, 0, 2, 10).hits == [1]


def test_a_block_without_the_needle_is_not_decoded() -> None:
    assert Filter('payload contains "abc"', TOPIC).needles is not None
    assert Filter("/id = 5", TOPIC).needles is not None
    assert Filter("not /id = 5", TOPIC).needles is None
    assert Filter('/id = 5 or key != "x"', TOPIC).needles is None
    assert Filter('subject = "orders"', TOPIC).needles is None, "the name of the topic is in no record"
    assert Filter('subject = "orders/eu"', TOPIC).needles is not None


def test_a_search_stops_at_its_offsets_and_at_its_count() -> None:
    data = bytes(encode_batch([Record(b"x%d" % number, timestamp=5 + number) for number in range(10)], 100).data)
    wanted = Filter('payload contains "x"', TOPIC)
    found = scan(data, wanted, 103, 108, 99)
    assert (found.hits, found.next_offset, found.records, found.time_ms) == ([103, 104, 105, 106, 107], 108, 5, 12)
    found = scan(data, wanted, 103, 108, 2)
    assert (found.hits, found.next_offset, found.records) == ([103, 104], 105, 2)
    rest = scan(data[found.size_bytes :], wanted, 105, 108, 99)
    assert rest.hits == [105, 106, 107]
    assert scan(data[:20], wanted, 100, 110, 9) == ([], 0, 0, 100, 0)


def test_a_root_sees_its_own_names() -> None:
    record = Record(b"", b"acme/orders/eu", ((b"ce_subject", b"acme/orders/eu"),), 1)
    data = bytes(encode_batch([record]).data)
    for text in ('subject = "orders/eu"', 'key = "orders/eu"', 'headers["ce_subject"] like "orders/*"'):
        assert scan(data, Filter(text, "acme/orders", root_of("acme")), 0, 1, 9).hits == [0], text
        assert (
            scan(data, Filter(text.replace("orders/", "acme/orders/"), "acme/orders", root_of("acme")), 0, 1, 9).hits
            == []
        )


def test_json_that_is_nested_too_deep_has_no_fields() -> None:
    deep = b'{"a":1,"b":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    data = bytes(encode_batch([Record(deep, timestamp=1)]).data)
    assert scan(data, Filter("/a = 1", TOPIC), 0, 1, 9).hits == []
    assert scan(data, Filter("not /a exists", TOPIC), 0, 1, 9).hits == [0]
