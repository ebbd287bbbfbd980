"""Bodies of pushes for records with any headers: of EventMesh, of other protocols, doubled, empty, no text."""

import msgspec
import pytest

from babelbus.protocols.eventmesh.records import FLAVOUR, MESSAGE_HEADERS, encode_body, encode_content
from babelbus.records.envelope import CONTENT_TYPE
from babelbus.records.record import Headers

PLAIN = (FLAVOUR, b"eventmeshmessage")

BODIES: list[tuple[Headers, dict[str, object]]] = [
    ((), {"properties": {}}),
    ((PLAIN,), {"properties": {}}),
    ((PLAIN, (b"ttl", b"1"), (b"eventmesh_content-type", b"x")), {"properties": {"ttl": "1", "content-type": "x"}}),
    ((PLAIN, (b"a", b"1"), (b"a", b"2")), {"properties": {"a": "2"}}),
    ((PLAIN, (b"a", b"1"), (b"eventmesh_a", b"2")), {"properties": {"a": "2"}}),
    ((PLAIN, (b"a", b"1"), (b"a", None)), {"properties": {}}),
    ((PLAIN, (b"a", b"\xff"), (b"b", b"1")), {"properties": {"a": "\\xff", "b": "1"}}),
    (((b"a", b"1"), PLAIN), {"properties": {"a": "1"}}),
    ((PLAIN, (b"a", b"1"), PLAIN), {"properties": {"a": "1"}}),
    (
        (PLAIN, (CONTENT_TYPE, b"text/plain"), (MESSAGE_HEADERS, b'{"n":1}'), (b"a", b"1")),
        {"properties": {"a": "1"}, "headers": {"datacontenttype": "text/plain", "n": 1}},
    ),
    ((PLAIN, (MESSAGE_HEADERS, b'{"n":"\xff"}')), {"properties": {}}),
    ((PLAIN, (MESSAGE_HEADERS, b"no JSON")), {"properties": {}}),
]


@pytest.mark.parametrize(("headers", "body"), BODIES)
def test_a_body_has_the_properties_of_any_headers(headers: Headers, body: dict[str, object]) -> None:
    flavour, encoded = encode_body("t", b"text", headers, {}, strict=False)
    assert flavour == "eventmeshmessage"
    assert msgspec.json.decode(encoded) == {"topic": "t", "body": "text", **body}


@pytest.mark.parametrize(("headers", "body"), BODIES)
def test_a_webhook_gets_the_properties_of_any_headers(headers: Headers, body: dict[str, object]) -> None:
    flavour, content, properties = encode_content("t", b"text", headers, {"more": "1"})
    typed = {name: str(value) for name, value in (body.get("headers") or {}).items()}  # type: ignore[attr-defined]
    assert (flavour, content) == ("eventmeshmessage", "text")
    assert properties == {**typed, **body["properties"], "more": "1"}  # type: ignore[dict-item]


def test_a_webhook_gets_the_flavour_of_a_publication_over_http() -> None:
    assert encode_content("t", b"text", ((FLAVOUR, b"http"), (b"a", b"1")), {}) == ("http", "text", {"a": "1"})
