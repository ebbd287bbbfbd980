import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.cli.lines import LineError, parse_line
from babelbus.cli.output import escape, human_bytes, human_time, json_record, show_bytes
from babelbus.cli.times import parse_time
from babelbus.records.record import Record
from babelbus.units import UnitError

NOW = 1_700_000_000_000


@given(st.binary())
def test_no_payload_can_steer_the_terminal(payload: bytes) -> None:
    assert all(char.isprintable() or char not in "\x1b\n\r\x07\x9b\u202e" for char in show_bytes(payload))


def test_text_stays_text_and_the_rest_is_escaped() -> None:
    assert show_bytes("Wörter ✓".encode()) == "Wörter ✓"
    assert show_bytes(b"a\x1b[31m\xff") == "a\\x1b[31m\\xff"
    assert escape("a\u202eb\nc") == "a\\u202eb\\nc"


texts = st.binary(max_size=20)


@given(
    st.builds(
        Record,
        st.none() | texts,
        st.none() | texts,
        st.lists(st.tuples(texts, st.none() | texts), max_size=4).map(tuple),
        st.integers(1, 2**62),
    )
)
def test_a_record_survives_its_json_line(record: Record) -> None:
    import msgspec

    line = msgspec.json.encode(json_record(record, "a", 3))
    read, partition = parse_line(line, 1)
    assert (read, partition) == (record, 3)


def test_a_payload_that_is_json_is_taken_as_it_is_written() -> None:
    assert parse_line(b'{"payload": {"a":  1}}', 1)[0].payload == b'{"a":  1}'
    assert parse_line(b'{"payload": null, "key": "k"}', 1)[0].payload is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b'{"paylod": "a"}',
        b'{"payload_base64": "?"}',
        b"\xff",
        b'{"payload": "a", "timestamp": -5}',
        b'{"payload": "a", "timestamp": 9223372036854775808}',
        b'{"payload": "a", "attributes": 16}',
        b'{"payload": "%b"}' % (b"a" * (2**24 + 1)),
    ],
    ids=len,
)
def test_a_line_that_is_no_record_is_named(line: bytes) -> None:
    with pytest.raises(LineError, match="line 7 is no record"):
        parse_line(line, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW),
        ("-1h", NOW - 3_600_000),
        ("1357035300000", 1_357_035_300_000),
        ("2013-01-01T10:15", 1_357_035_300_000),
        ("2013-01-01T11:15+01:00", 1_357_035_300_000),
        ("2013-01-01", 1_356_998_400_000),
        ("2013", 1_356_998_400_000),
    ],
)
def test_a_time_is_read_as_people_write_it(text: str, expected: int) -> None:
    assert parse_time(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "-", "yesterday", "-1", "2013-13-01", "-1x"])
def test_what_is_no_time_is_refused_with_the_forms_that_are(text: str) -> None:
    if text == "-1":
        assert parse_time(text, NOW) == NOW - 1000
        return
    with pytest.raises(UnitError, match="is no time"):
        parse_time(text, NOW)


def test_sizes_and_times_are_short() -> None:
    assert (human_bytes(0), human_bytes(1536), human_bytes(5 * 2**40)) == ("0 B", "1.5 KiB", "5.0 TiB")
    assert human_time(1_357_035_300_001) == "2013-01-01T10:15:00.001Z"
    assert human_time(2**62) == str(2**62)
