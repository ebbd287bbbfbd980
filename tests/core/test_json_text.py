"""A payload as JSON text: JSON stays JSON, text becomes a string, anything else base64.

See: docs/design/design.md, section 5.
"""

import base64
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.json_text import json_text

JSON = ((b"content-type", b"application/json"),)


@pytest.mark.parametrize(
    "content_type",
    [b"application/json", b"application/json; charset=utf-8", b"Application/JSON", b"application/cloudevents+json"],
)
def test_json_that_says_so_stays_as_it_is(content_type: bytes) -> None:
    assert json_text(b' {"a": [1, null]}', ((b"content-type", content_type),)) == b' {"a": [1, null]}'


@pytest.mark.parametrize("headers", [(), ((b"content-type", b"text/plain"),), ((b"content-type", None),)])
def test_json_that_does_not_say_so_is_a_text(headers: tuple[tuple[bytes, bytes | None], ...]) -> None:
    assert json.loads(json_text(b'{"a":1}', headers)) == '{"a":1}'


@pytest.mark.parametrize("payload", [b"{", b"NaN", b"1 2", b'{"a":1}x', b"[" * 100_000])
def test_what_says_that_it_is_json_and_is_not_becomes_a_text(payload: bytes) -> None:
    assert json.loads(json_text(payload, JSON)) == payload.decode()


def test_bytes_that_are_no_text_become_base64() -> None:
    assert json_text(b"\xff\x00", JSON) == b'{"base64":"%b"}' % base64.b64encode(b"\xff\x00")


def test_text_that_looks_like_base64_is_told_from_bytes() -> None:
    text = base64.b64encode(b"\xff\x00")
    assert json_text(text, ()) == b'"%b"' % text


@pytest.mark.parametrize("payload", [b"", None])
def test_nothing_is_an_empty_text(payload: bytes | None) -> None:
    assert json_text(payload, JSON) == b'""'


@given(st.binary(), st.booleans())
def test_whatever_comes_is_json_for_every_parser(payload: bytes, says_json: bool) -> None:
    text = json_text(payload, JSON if says_json else ())
    msgspec.json.decode(text)
    json.loads(text)


@pytest.mark.parametrize(("levels", "stays_json"), [(1, True), (120, True), (121, False), (600, False), (9999, False)])
def test_json_that_is_nested_deeper_than_readers_can_read_becomes_a_string(levels: int, stays_json: bool) -> None:
    text = b"[" * levels + b"1" + b"]" * levels
    assert (json_text(text, ((b"content-type", b"application/json"),)) == text) is stays_json
