"""Values as JSON texts: what may be one, which are the same, and how they leave for TCP."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.errors import LocalProtocolError
from babelbus.protocols.worterbuch.lines import LINES
from babelbus.protocols.worterbuch.values import (
    ARRAYS_BYTES_MIN,
    ascii_json,
    nesting,
    one_line,
    parse_value,
    same_value,
    text_json,
)

numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

SAME = [
    ("1", "1"),
    ("1.0", "1.00"),
    ("1.0", "1e0"),
    ('"a"', '"\\u0061"'),
    ("[1, 2]", "[1,2]"),
    ('{"a":1,"b":[true]}', '{"b":[true],"a":1}'),
    ("18446744073709551616", "18446744073709551616.0"),
    ("-9223372036854775809", "-9223372036854775809e0"),
    ("-0", "-0.0"),
]
DIFFERENT = [
    *((one, other) for one in ("1", "1.0", "true", '"1"') for other in ("1", "1.0", "true", '"1"') if one != other),
    ("null", "false"),
    ("0", "false"),
    ('""', "null"),
    ("[]", "{}"),
    ("[1,2]", "[2,1]"),
    ("[1]", "[1,1]"),
    ("[1]", "[1.0]"),
    ('{"a":1}', '{"a":true}'),
    ('{"a":1}', '{"b":1}'),
    ('{"a":1}', '{"a":1,"b":1}'),
    ("18446744073709551615", "18446744073709551614"),
    ("9007199254740993", "9007199254740992"),
    ("-0", "0"),
    ('"é"', '"e"'),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_values_are_the_same_whatever_their_spelling(one: str, other: str) -> None:
    assert same_value(one.encode(), other.encode())
    assert same_value(other.encode(), one.encode())


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_values_of_other_types_or_contents_differ(one: str, other: str) -> None:
    assert not same_value(one.encode(), other.encode())
    assert not same_value(other.encode(), one.encode())


def test_values_too_deep_to_compare_count_as_changed() -> None:
    deep = b"[" * 5000 + b"]" * 5000
    assert same_value(deep, deep)
    assert not same_value(deep, b" " + deep)


@settings(deadline=None)
@given(values)
def test_neither_blanks_nor_escapes_nor_the_order_of_members_make_another_value(value: object) -> None:
    one = json.dumps(value, ensure_ascii=True, indent=1).encode()
    other = json.dumps(value, ensure_ascii=False, sort_keys=True).encode()
    assert same_value(one, other)


@settings(deadline=None)
@given(values)
def test_a_value_leaves_for_tcp_in_ascii_on_one_line_and_means_the_same(value: object) -> None:
    for text in (json.dumps(value, ensure_ascii=False, indent=1), json.dumps(value, ensure_ascii=False)):
        sent = LINES.encode([text.encode()])
        assert sent.isascii()
        assert sent.count(b"\n") == 1
        assert b"\r" not in sent
        assert json.loads(sent) == value
        assert ascii_json(sent) == sent
        many = ARRAYS_BYTES_MIN // len(text) + 1  # these are escaped by arrays
        assert LINES.encode([text.encode()] * many) == sent * many


def test_ascii_escapes_are_pairs_beyond_the_first_plane_and_the_rest_stays_as_it_was_written() -> None:
    assert (
        ascii_json('{"é" : "\\u00e9😀\\n", "x":1.0}'.encode()) == b'{"\\u00e9" : "\\u00e9\\ud83d\\ude00\\n", "x":1.0}'
    )
    planes = '"\u00e9\u07ff\u0800\uffff\U00010000\U0010ffff\x7f"'.encode()
    assert ascii_json(planes) == rb'"\u00e9\u07ff\u0800\uffff\ud800\udc00\udbff\udfff' + b'\x7f"'
    assert ascii_json(planes * 10_001) == ascii_json(planes) * 10_001  # several blocks
    unchanged = b'{"a" : 1.50}'
    assert ascii_json(unchanged) is unchanged


def test_only_raw_line_ends_cost_a_value_its_blanks() -> None:
    assert one_line(b'[ 1 ,"\\n\\r" ]') == b'[ 1 ,"\\n\\r" ]'
    assert one_line(b'[ 1.00 ,\r\n"\\n  x" ]') == b'[1.00,"\\n  x"]'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b" 1 ", b"1"),
        (b"\n{\n}\r\n", b"{}"),
        (b'{"a":\n"b c"}', b'{"a":"b c"}'),
        (b"12345678901234567890123", b"12345678901234567890123"),
        (b"1" * 308, b"1" * 308),
        (b"[" * 120 + b"]" * 120, b"[" * 120 + b"]" * 120),
        ('"é\\ud83d\\ude00"'.encode(), '"é\\ud83d\\ude00"'.encode()),
    ],
)
def test_a_text_of_unknown_origin_becomes_a_value(text: bytes, value: bytes) -> None:
    assert parse_value(text) == value


NO_VALUES = [
    *(b"", b" ", b"nul", b"NaN", b"-Infinity", b"1e400", b"1 2", b"[1,]", b"{'a':1}", b"01", b'"\xff"', b'"\\ud800"'),
    *(b"[" * 121 + b"]" * 121, b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"9" * 309, b"[%b]" % (b"9" * 9999)),
    b"\xef\xbb\xbf1",
]


@pytest.mark.parametrize("text", NO_VALUES)
def test_what_no_client_could_read_is_no_value(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_value(text)


@settings(deadline=None)
@given(values)
def test_nesting_is_counted_as_the_parser_sees_it(value: object) -> None:
    def depth(part: object) -> int:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert nesting(json.dumps(value).encode()) == depth(value)


@settings(deadline=None)
@given(st.text())
def test_a_text_is_quoted_in_ascii(text: str) -> None:
    quoted = text_json(text)
    assert quoted.isascii()
    assert json.loads(quoted) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udcff"])
def test_a_text_that_is_not_unicode_is_refused(text: str) -> None:
    with pytest.raises(LocalProtocolError):
        text_json(text)
