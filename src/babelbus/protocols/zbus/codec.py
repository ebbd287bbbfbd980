"""Bytes <-> messages of zbus over WebSocket (docs/specifications/zbus.md, section 2.2): one frame is one JSON object.

A body is not decoded: its JSON text goes from the frame to the log and from there to other frames. Strings are the
exception (messages.py); most of them cost a slice, not a decoding.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from babelbus.errors import UNREADABLE, without_frames
from babelbus.protocols.zbus.content import json_body
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.messages import (
    COOKIES_BETWEEN,
    HEADERS_MAX,
    PUBLISH,
    RUN_MIN,
    SET_COOKIE,
    BodyKind,
    Item,
    Message,
    Run,
    canonical_headers,
)

NO_BODY: Final = msgspec.Raw(b"")
NULL: Final = msgspec.Raw(b"null")


class _Frame(msgspec.Struct, gc=False):
    """The frame that nearly every client sends."""

    headers: dict[str, str] = {}
    body: msgspec.Raw = NO_BODY
    url: str | None = None
    method: str | None = None
    status: int | None = None


class _Reply(msgspec.Struct, gc=False, omit_defaults=True):
    """The frame that we send: absent fields are not there."""

    headers: dict[str, str]
    body: msgspec.Raw | str | msgspec.UnsetType = msgspec.UNSET
    url: str | None = None
    method: str | None = None
    status: int | None = None


_decode_frame = msgspec.json.Decoder(_Frame).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_string = msgspec.json.Decoder(str).decode
_FIELDS: Final = frozenset(_Frame.__struct_fields__)
_encode = msgspec.json.Encoder().encode


def decode_message(text: bytes) -> Message:
    """Read one frame.

    Raises:
        MalformedMessageError: it is no JSON object, or one that is no message; answer 400.
    """
    try:
        frame = _decode_frame(text)
    except UNREADABLE:
        return _decode_slowly(text)
    return _message_of(frame, text)


def decode_messages(texts: Sequence[bytes]) -> list[Item]:
    """Read the frames of one read; publications with the same headers but for the id come as a run."""
    try:
        frames = list(map(_decode_frame, texts))
    except UNREADABLE:
        return [_or_error(decode_message, text) for text in texts]
    if len(frames) < RUN_MIN:
        return [_or_error(_message_of, frame, text) for frame, text in zip(frames, texts, strict=True)]
    ids = [frame.headers.pop("id", None) for frame in frames]
    items: list[Item] = []
    start, count = 0, len(frames)
    while start < count:
        headers, end = frames[start].headers, start + 1
        while end < count and frames[end].headers == headers:
            end += 1
        run = _run_of(frames[start:end], ids[start:end]) if end - start >= RUN_MIN else None
        if run is not None:
            items.append(run)
        else:
            items += [_or_error(_message_of, frames[at], texts[at], ids[at]) for at in range(start, end)]
        start = end
    return items


def _or_error(decode: Callable[..., Message], *arguments: object) -> Message | MalformedMessageError:
    try:
        return decode(*arguments)
    except MalformedMessageError as error:
        return without_frames(error)


def _run_of(frames: Sequence[_Frame], ids: list[str | None]) -> Run | None:
    """Return the run that frames with the same headers are, `None` if they are no run."""
    headers = canonical_headers(frames[0].headers)
    if headers.get("cmd") != PUBLISH or "id" in headers or len(headers) >= HEADERS_MAX:
        return None
    if any(frame.url is not None or frame.method is not None or frame.status is not None for frame in frames):
        return None
    try:
        bodies, kinds = zip(*[json_body(bytes(frame.body)) for frame in frames], strict=True)
    except ValueError:
        return None
    if None in bodies or len(set(kinds)) > 1:
        return None
    return Run(Message(headers, body=b"", body_kind=kinds[0]), ids, list(bodies))


def _message_of(frame: _Frame, text: bytes, request_id: str | None = None) -> Message:
    """Return what a frame says; `text` is the frame, `request_id` the header that was taken from it.

    Raises:
        MalformedMessageError: it is no message.
    """
    headers = frame.headers
    if request_id is None:
        if not headers and b'"cmd"' in text:
            return _decode_slowly(text)
        return _message(headers, frame.url, frame.method, frame.status, bytes(frame.body))
    message = _message(headers, frame.url, frame.method, frame.status, bytes(frame.body))
    if "id" in message.headers or len(headers) == HEADERS_MAX:  # the last of two spellings counts
        return decode_message(text)
    message.headers["id"] = request_id
    return message


def _message(headers: dict[str, str], url: str | None, method: str | None, status: int | None, raw: bytes) -> Message:
    """Check what was read; `raw` is the JSON text of the body, empty for none."""
    if len(headers) > HEADERS_MAX:
        raise MalformedMessageError(f"{len(headers)} headers, limit {HEADERS_MAX}")
    if status is not None and not 100 <= status <= 999:
        raise MalformedMessageError("status is no number from 100 to 999")
    try:
        body, kind = json_body(raw)
    except ValueError as error:
        raise MalformedMessageError("body is no UTF-8") from error
    return Message(canonical_headers(headers), url, method, status, body, kind)


def _decode_slowly(text: bytes) -> Message:
    """Read what clients may send and rarely do: header values that are no strings, null, no `headers` at all."""
    try:
        members = _decode_members(text)
        raw_headers = members.get("headers")
        if raw_headers is not None and bytes(raw_headers) != b"null":
            headers = _headers(_decode_members(raw_headers))
        elif "cmd" in members:  # the form of the alpha's samples (section 11, DECISION)
            headers = _headers({name: raw for name, raw in members.items() if name not in _FIELDS})
        else:
            headers = {}
        status = _scalar("status", members.get("status", NULL))
        return _message(
            headers,
            _scalar("url", members.get("url", NULL)),
            _scalar("method", members.get("method", NULL)),
            _status(status) if status is not None else None,
            bytes(members.get("body", NULL)),
        )
    except UNREADABLE as error:
        raise MalformedMessageError(f"no message: {_reason(error)}") from error


def _headers(members: dict[str, msgspec.Raw]) -> dict[str, str]:
    values = ((name, _scalar(name, raw)) for name, raw in members.items())
    return {name: value for name, value in values if value is not None}


def _scalar(name: str, raw: msgspec.Raw) -> str | None:
    """Return a value as text, `None` for null; a number as its sender wrote it. R3 sends repeated headers as a list."""
    token = bytes(raw)
    if token == b"null":
        return None
    if token[:1] == b'"':
        return _decode_string(token)
    if token[:1] == b"[":
        texts = (_scalar(name, item) for item in _decode_items(token))
        between = COOKIES_BETWEEN if name.lower() == SET_COOKIE else ", "
        return between.join(text for text in texts if text is not None)
    if token[:1] == b"{":
        raise MalformedMessageError(f"{name[:40]} is no text")
    return token.decode()


def _status(text: str) -> int:
    if len(text) == 3 and text.isascii() and text.isdigit():
        return int(text)
    raise MalformedMessageError("status is no number from 100 to 999")


def _reason(error: Exception) -> str:
    """Return what is wrong without what was sent: a text of the decoder, or that it is nested too deep."""
    return "nested too deep" if isinstance(error, RecursionError) else f"no JSON object of UTF-8 ({error})"[:200]


def encode_message(message: Message) -> bytes:
    """Return the frame that says `message`. Header values are JSON strings: with a number the JS client stalls
    (2.1).
    """
    headers, body = message.headers, message.body
    encoded: msgspec.Raw | str | msgspec.UnsetType = msgspec.UNSET
    if body is not None and message.body_kind == "json":
        encoded = msgspec.Raw(body)
    elif body is not None:
        encoded = _string(body, message.body_kind)
        if message.body_kind == "bytes":
            headers = base64_headers(headers)
    return _encode(_Reply(headers, encoded, message.url, message.method, message.status))


def base64_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers of a message whose body is bytes: base64 in JSON, and they say so.

    See: docs/design/design.md, section 5.
    """
    coding = headers.get("content-encoding")
    return {**headers, "content-encoding": "base64" if coding is None else f"{coding}, base64"}


def _string(body: bytes, kind: BodyKind) -> str:
    return body.decode() if kind == "text" else base64.b64encode(body).decode()


def body_json(message: Message) -> bytes:
    """Return the JSON text of a body that is there."""
    assert message.body is not None
    return message.body if message.body_kind == "json" else _encode(_string(message.body, message.body_kind))


def delivery_head(message: Message, mq: str, offset: int) -> bytes:
    """Return what the deliveries of a message have in common: made once, however many channels and consumers there are.

    It is a JSON object, still open inside of its headers; `encode_deliveries` closes it. Status is left out (4.3).
    """
    headers = {**message.headers, "mq": mq, "offset": str(offset)}
    headers.pop("channel", None)
    headers.pop("window", None)
    if message.body is not None and message.body_kind == "bytes":
        headers = base64_headers(headers)
    start = b"{"
    if message.url is not None:
        start += b'"url":%b,' % _encode(message.url)
    if message.method is not None:
        start += b'"method":%b,' % _encode(message.method)
    if message.body is not None:
        start += b'"body":%b,' % body_json(message)
    return b'%b"headers":%b' % (start, _encode(headers)[:-1])


def delivery_tail(channel: str) -> bytes:
    """Return what the deliveries to a subscription have in common: made once for each subscription."""
    return b',"channel":%b' % _encode(channel)


def encode_deliveries(heads: Sequence[bytes], tail: bytes, window: int | None) -> list[bytes]:
    """Return the frames of deliveries to one subscription; `window` is what is left of it behind the last of them.

    `None` when it is unlimited. It goes down with each delivery, and each says what was left then.
    """
    if window is None:
        return [b"%b%b}}" % (head, tail) for head in heads]
    last = window + len(heads) - 1
    return [b'%b%b,"window":"%d"}}' % (head, tail, last - number) for number, head in enumerate(heads)]


def taken(heads: list[bytes]) -> bytes:
    """Return the body of an answer to `take`: the list of messages whose `delivery_head` these are (4.4)."""
    return b"[%b}}]" % b"}},".join(heads) if heads else b"[]"
