"""A push to a webhook as bytes, and the meaning of its answer (docs/specifications/eventmesh.md, 5.1 and 5.2)."""

from collections.abc import Mapping
from urllib.parse import urlencode

import msgspec

from babelbus.errors import UNREADABLE, BabelbusError
from babelbus.protocols.eventmesh.records import encode_content
from babelbus.records.envelope import CONTENT_TYPE
from babelbus.records.record import Headers
from babelbus.wire.http import Response

PUSH_ASYNC = "105"
PUSH_SYNC = "106"
RETRY_SECONDS = 3.0
RETRY_AFTER_SECONDS_MAX = 90.0
"""A webhook that asks for a longer wait before the next push does not get it."""
TAKEN = (200, 201, 202, 204)
NOT_RETRIED = (410, 415)
RETCODE_RETRY = (2, 5)
RETCODE_FAIL = 3
OWN_FIELDS = frozenset(
    ("code", "connection", "content-length", "content-type", "expect", "host", "keep-alive", "language", "te",
     "trailer", "transfer-encoding", "upgrade", "version")
)  # fmt: skip
"""Header fields of a push that no event may set: a second length would hide a request in the body."""

_decode_answer = msgspec.json.Decoder(dict[str, object]).decode
_encode = msgspec.json.Encoder().encode


def encode_head(code: str, cluster: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers of every push with a request code; those of the `cluster` name the server."""
    return [("content-type", "application/x-www-form-urlencoded; charset=UTF-8"), ("code", code),
            ("language", "PYTHON"), ("version", "1.0"), *cluster.items()]  # fmt: skip


def encode_push(
    topic: str, payload: bytes | None, headers: Headers, more: dict[str, str], number: str, kind: str
) -> tuple[dict[str, str], bytes]:
    """Return the header fields and the form of a message, with the number of the push and further properties.

    `kind` is the `protocoldesc` of the webhook, empty for one of HTTP (5.1).
    """
    flavour, content, properties = encode_content(topic, payload, headers, more, data_alone=bool(kind))
    named = properties.get("seqnum" if kind else "bizseqno")
    form = urlencode({
        "content": content,
        "bizseqno": named or number.rjust(20, "0"),
        "uniqueId": properties.get("uniqueid") or number.rjust(20, "0"),
        "randomNo": number,
        "topic": topic,
        "extFields": _encode(properties).decode(),
    }).encode()  # fmt: skip
    fields: dict[str, str] = {"protocoltype": flavour}
    if kind:
        content_type = dict(headers).get(CONTENT_TYPE) or b"text/plain"
        fields |= {"protocoldesc": kind, "protocolversion": "1.0", "contenttype": content_type.decode("latin-1")}
    if flavour == "http":
        fields = properties | fields
    return {name: text for name, text in fields.items() if _is_field(name, text)}, form


def read_answer(response: Response | None, error: BabelbusError | None) -> tuple[str, float | None]:
    """Return why a webhook did not take a message, and after how many seconds to try again; `None` for never.

    Without a response there is an `error`, which says why.
    """
    if response is None:
        return str(error), RETRY_SECONDS
    if response.status in TAKEN:
        code = _retcode(response)
        if code in RETCODE_RETRY:
            return f"the webhook answered retCode {code}", RETRY_SECONDS
        return ("the webhook answered retCode 3" if code == RETCODE_FAIL else ""), None
    text = f"the webhook answered {response.status}"
    if response.status in NOT_RETRIED:
        return text, None
    after = response.headers.get("retry-after", "")
    if response.status == 429 and after.isascii() and after.isdigit():
        return text, min(float(after), RETRY_AFTER_SECONDS_MAX)
    return text, RETRY_SECONDS


def _retcode(response: Response) -> object:
    """Return the code of an answer, `None` if it has no code: Go's examples answer with an empty body (5.2)."""
    try:
        return _decode_answer(response.body).get("retCode")
    except UNREADABLE:
        return None


def _is_field(name: str, text: str) -> bool:
    is_plain = name.isascii() and name.replace("-", "").isalnum() and text.isascii() and text.isprintable()
    return is_plain and name.lower() not in OWN_FIELDS
