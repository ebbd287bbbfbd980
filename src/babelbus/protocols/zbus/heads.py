"""Stored messages -> what their deliveries have in common (`codec.delivery_head`), by what they have in common.

Behind the id, the headers of messages from one connection are the same as a rule. So they are looked up, with what
they become in JSON; what is unusual goes the long way, which gives the same.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from babelbus.core.record import Headers, Record
from babelbus.protocols.zbus.codec import delivery_head
from babelbus.protocols.zbus.records import from_record

SHAPES_MAX: Final = 1024
SHAPE_HEADERS_MAX: Final = 24
_ID: Final = b"ce_id"
_encode = msgspec.json.Encoder().encode
_validate = msgspec.json.Decoder(msgspec.Raw).decode
_MARK: Final = 7355608
"""Stands for a body, an id and an offset in a shape."""
_TEXT_MARK: Final = b"\x01%d\x01" % _MARK


class _Shape(msgspec.Struct, frozen=True, gc=False):
    """What stands in front of the body, between body and id, and between id and offset; `kind` is the body's."""

    before: bytes
    between: bytes
    after: bytes
    kind: str


class Heads:
    """The heads of the messages of one MQ."""

    def __init__(self, mq: str) -> None:
        self._mq = mq
        self._shapes: dict[Headers, _Shape | None] = {}

    def of(self, records: Sequence[Record]) -> list[bytes]:
        """Give the head of each."""
        shapes, mq = self._shapes, self._mq
        heads: list[bytes] = []
        append = heads.append
        for one in records:
            headers = one.headers
            if headers and headers[0][0] == _ID and one.payload:
                rest = headers[1:]
                try:
                    shape = shapes[rest]
                except KeyError:
                    shape = self._learn(rest)
                if shape is not None:
                    try:
                        request_id = _encode((headers[0][1] or b"").decode())
                        if shape.kind == "text":
                            body = _encode(one.payload.decode())
                        else:
                            body = one.payload
                            if body[0] not in b"[{" or not body.isascii():
                                raise ValueError
                            _validate(body)
                        append(
                            b'%b%b%b%b%b,"offset":"%d"'
                            % (shape.before, body, shape.between, request_id, shape.after, one.offset)
                        )
                        continue
                    except (ValueError, RecursionError):  # what is no text or no JSON has another form
                        pass
            append(delivery_head(from_record(one.payload, one.key, headers, mq), mq, one.offset))
        return heads

    def _learn(self, rest: Headers) -> _Shape | None:
        shape = None
        if len(rest) <= SHAPE_HEADERS_MAX and any(
            name == b"ce_source" and (value or b"").startswith(b"zbus:") for name, value in rest
        ):
            shape = self._make(rest)
        if len(self._shapes) >= SHAPES_MAX:
            self._shapes.clear()
        self._shapes[rest] = shape
        return shape

    def _make(self, rest: Headers) -> _Shape | None:
        """Write a message with marks the long way, and cut it at the marks."""
        headers = ((_ID, _TEXT_MARK), *rest)
        message = from_record(b"[%d]" % _MARK, None, headers, self._mq)
        if message.body_kind not in ("json", "text"):
            return None
        head = delivery_head(message, self._mq, _MARK)
        body = b"[%d]" % _MARK if message.body_kind == "json" else _encode(f"[{_MARK}]")
        request_id = _encode(_TEXT_MARK.decode())
        offset = b',"offset":"%d"' % _MARK
        if not head.endswith(offset):
            return None
        before, body_found, rest_of = head[: -len(offset)].partition(b'"body":' + body + b",")
        between, id_found, after = rest_of.partition(request_id)
        if not body_found or not id_found or b"%d" % _MARK in before + between + after:
            return None
        return _Shape(before + b'"body":', b"," + between, after, message.body_kind)
