"""Stored messages -> what their deliveries have in common (`codec.delivery_head`), a chunk at a time.

Behind the id, the stored headers of messages from one connection are nearly always the same, byte for byte: their
*shape*. It is looked up, with what it becomes in JSON, and body, id and offset are filled in. Unusual messages are
written the long way, which gives the same.
"""

import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from babelbus.core.access import Root
from babelbus.core.groups import Delivery, Rows, Run, pick
from babelbus.core.record import Record
from babelbus.protocols.zbus.codec import delivery_head
from babelbus.protocols.zbus.records import ORIGIN_PREFIX, from_record
from babelbus.protocols.zbus.rooted import relative_delivery
from babelbus.records.envelope import ID_HEADER, SOURCE_HEADER
from babelbus.records.headers import read_headers

SHAPES_MAX: Final = 1024
SHAPE_BYTES_MAX: Final = 1024
"""Longer headers are no shape: what is remembered of clients' choices stays within some MiB."""
LEARNED_ONCE_MAX: Final = 8
"""So many shapes of a chunk are learned although one record has them: with more, they do not seem to come again."""

_OWN: Final = ORIGIN_PREFIX.encode()
_STORED_IDS: Final = uuid.UUID("6d0a5bd5-6f8c-4b0e-9d3c-0c2b5e1f7a42")
"""The name space of `stored_id`."""
_MARK: Final = 7355608
"""Stands for a body, an id and an offset in a shape."""
_TEXT_MARK: Final = b"\x01%d\x01" % _MARK
_VALUES: Final = frozenset(b"[{-0123456789tf")
"""First bytes of the JSON values that are neither strings nor null."""
_encode = msgspec.json.Encoder().encode
_validate = msgspec.json.Decoder(msgspec.Raw).decode


class _Shape(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The template of body, id and offset, which are JSON values but for the offset."""

    template: bytes
    is_text: bool
    """Whether the body is a string; else it is any other JSON value."""

    def head(self, body: bytes, request_id: bytes, offset: int) -> bytes | None:
        """Return the head of a message; `None` if it is not what its record says."""
        try:
            value = _encode(body.decode()) if self.is_text else body if _is_value(body) else None
            return None if value is None else self.template % (value, _encode(request_id.decode()), offset)
        except UnicodeDecodeError:
            return None


class Heads:
    """The heads of the messages of one MQ for clients of one root; `topic_id` is that of its topic."""

    def __init__(self, mq: str, topic_id: str = "", root: Root | None = None) -> None:
        self._mq = mq
        self._root = root
        self._shown = mq if root is None else root.relative(mq)
        self.topic_id = topic_id
        self._shapes: dict[bytes, _Shape | None] = {}

    def of(self, messages: Sequence[Record]) -> list[bytes]:
        """Return the head of each."""
        if not isinstance(messages, Run):
            return [self._slowly(one, one.partition if isinstance(one, Delivery) else 0) for one in messages]
        rows, numbers = messages.rows, messages.numbers
        made = rows.made(self._encode)
        heads = pick(made, numbers)
        if None in heads:
            for number in numbers:
                if made[number] is None:
                    made[number] = self._slowly(rows.record(number), messages.partition)
            heads = pick(made, numbers)
        return heads  # type: ignore[return-value]  # there is no `None` left

    def _slowly(self, record: Record, partition: int) -> bytes:
        message = from_record(record.payload, record.key, record.headers, self._shown)
        if self._root is not None:
            message = relative_delivery(message, self._root)
        if "id" not in message.headers:
            message.headers["id"] = stored_id(self._mq, self.topic_id, partition, record.offset)
        return delivery_head(message, self._shown, record.offset)

    # -- a chunk at once ---------------------------------------------------------------------------------------------

    def _encode(self, rows: Rows) -> list[bytes | None]:
        """Return the heads of a chunk, `None` for those that take the long way: made when somebody asks for them."""
        heads: list[bytes | None] = [None] * rows.count
        found = rows.leading(ID_HEADER)
        if not len(found.numbers):
            return heads
        rests = found.rests()
        self._learn(rests)
        offsets = pick(rows.offsets, found.numbers)
        for number, rest, body, request_id, offset in zip(
            found.numbers, rests, found.payloads(), found.values(), offsets, strict=True
        ):
            shape = self._shapes.get(rest)
            if shape is not None:
                heads[number] = shape.head(body, request_id, offset)
        return heads

    def _learn(self, rests: Sequence[bytes]) -> None:
        """Record the shapes that are new."""
        shapes = self._shapes
        new = set(rests).difference(shapes)
        if not new:
            return
        if len(new) > LEARNED_ONCE_MAX:
            counts = Counter(rests)
            new = {rest for rest in new if counts[rest] > 1}
        wanted = [rest for rest in new if len(rest) <= SHAPE_BYTES_MAX][:SHAPES_MAX]
        if len(shapes) + len(wanted) > SHAPES_MAX:
            shapes.clear()
        for rest in wanted:
            shapes[rest] = self._shape(rest)

    def _shape(self, rest: bytes) -> _Shape | None:
        """Return what stored headers behind an id become, `None` if they take the long way.

        A message with marks is written the long way, and cut at the marks.
        """
        headers = read_headers(rest)
        if not any(name == SOURCE_HEADER and (value or b"").startswith(_OWN) for name, value in headers):
            return None
        message = from_record(b"[%d]" % _MARK, None, ((ID_HEADER, _TEXT_MARK), *headers), self._shown)
        if self._root is not None:
            message = relative_delivery(message, self._root)
        if message.body_kind not in ("json", "text"):
            return None
        text = message.body_kind == "text"
        head = delivery_head(message, self._shown, _MARK)
        body = _encode(f"[{_MARK}]") if text else b"[%d]" % _MARK
        offset = b',"offset":"%d"' % _MARK
        if not head.endswith(offset):
            return None
        before, body_found, behind = head[: -len(offset)].partition(b'"body":' + body + b",")
        between, id_found, after = behind.partition(_encode(_TEXT_MARK.decode()))
        if not body_found or not id_found or b"%d" % _MARK in before + between + after:
            return None
        before, between, after = (part.replace(b"%", b"%%") for part in (before, between, after))
        return _Shape(b'%b"body":%%b,%b%%b%b,"offset":"%%d"' % (before, between, after), text)


def _is_value(body: bytes) -> bool:
    """Return whether it is the text of a JSON value, but for strings and null, which have another form."""
    if not body or body[0] not in _VALUES:
        return False
    try:
        if not body.isascii():
            body.decode()  # the decoder looks at what becomes a string alone
        _validate(body)
    except (ValueError, RecursionError):
        return False
    return True


def stored_id(topic: str, topic_id: str, partition: int, offset: int) -> str:
    """Return the id of a stored message that its publisher, of another protocol, has given none (section 4.3).

    A UUID of version 5, from where the message is: every channel and every replay sees the same. `topic_id` is another
    one when the topic was removed and made again, and for a topic in memory when the server has started.
    """
    return str(uuid.uuid5(_STORED_IDS, f"{topic}/{topic_id}/{partition}/{offset}"))
