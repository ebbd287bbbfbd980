"""JSON texts <-> messages of Wörterbuch, the server's side (docs/specifications/worterbuch.md, 4 to 6, 13).

Every message is an object with one member, whose name is the message. The usual spelling, with no blank before the
inner object, is found by its first bytes; other spellings take the general path. Encoders return JSON without a line
end; keys, patterns and texts leave in ASCII, values as they are stored (`values.ascii_json` for TCP and unix). A
message of an event is a head and a *tail*, which is encoded once for all receivers.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import msgspec

from babelbus.protocols.worterbuch.errors import ErrorCode, MalformedMessageError
from babelbus.protocols.worterbuch.messages import ClientMessage, Keepalive, ServerInfo, SetRun, Version
from babelbus.protocols.worterbuch.readers import READ_ERRORS, READERS, decode_sets, read_values
from babelbus.protocols.worterbuch.values import INTEGER_MAX, text_json

KEEPALIVE = b'""'
AUTHORIZED = b'{"authorized":{"transactionId":0}}'
AUTHENTICATED = b'{"authenticated":{"transactionId":0}}'

_BLANKS = b" \t\r\n"
PART_BYTES = 256
"""Memory of a part of a line beside its bytes: a peer may send single bytes."""
_SET_BYTES = len(b'{"set":')
_SETS = (b'{"set":{', b'{"set": {')
RUN_MIN = 16
"""So many sets in one chunk are read and stored by columns."""
_EMPTY = (b"", b"\r")
_BRACE = ord("}")
_STARTS = {b'{"%b"' % name.encode(): read for name, read in READERS.items()}

_decode_name = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode
_encode_json = msgspec.json.Encoder().encode


def decode_chunk(texts: Sequence[bytes]) -> SetRun | None:
    """Return the texts of one chunk by columns, in a third of the time, if all are sets; `None`: use `decode_messages`.

    The inner objects are decoded in one call. A text begins and ends with braces, which JSON cannot have on both sides
    of a line end: so no object continues in the next text, and as many objects as texts are one in each.
    """
    if len(texts) < RUN_MIN or not all(map(bytes.startswith, texts, repeat(_SETS))):
        return None
    if not all(map(bytes.endswith, texts, repeat(b"}}"))):
        return None
    inner = b"\n".join([text[_SET_BYTES:-1] for text in texts])
    try:
        if not inner.isascii():
            inner.decode()
        sets = decode_sets(inner)
        values = read_values([one.value for one in sets])
    except READ_ERRORS:
        return None
    transaction_ids = [one.transaction_id for one in sets]
    if len(sets) > len(texts) or max(transaction_ids) > INTEGER_MAX:
        return None
    return SetRun(transaction_ids, [one.key for one in sets], values)


def decode_messages(texts: Iterable[bytes], messages: list[ClientMessage]) -> None:
    """Read WebSocket texts or lines, each one message, and append the messages.

    Raises:
        MalformedMessageError: a text is no message (section 4); with the transaction id if it can be read. `messages`
            has the messages before it.
    """
    text = b""
    try:
        for text in texts:
            if not text.isascii():
                text.decode()
            head, _, inner = text.partition(b":")
            read = _STARTS.get(head)
            if read is not None and text[-1] == _BRACE:
                # Bytes that follow the inner object, a second member too, are no JSON there.
                messages.append(read(inner[:-1]))
            else:
                messages.append(_decode_unusual(text))
    except READ_ERRORS as error:
        raise _malformed(text, error) from error


def _decode_unusual(text: bytes) -> ClientMessage:
    text = text.strip(_BLANKS)
    if text == KEEPALIVE:
        return Keepalive()
    if text[:1] != b"{" or text[-1:] != b"}":
        raise ValueError("no object")
    body = text[1:-1].lstrip(_BLANKS)
    end = body.find(b'"', 1) + 1
    while body[end - 2 : end - 1] == b"\\" and end:  # no name has a quote in it, but unknown ones may
        end = body.find(b'"', end) + 1
    if body[:1] != b'"' or not end:
        raise ValueError("no member")
    name = _decode_name(body[:end])
    inner = body[end:].lstrip(_BLANKS)
    if inner[:1] != b":":
        raise ValueError("no member")
    read = READERS.get(name)
    if read is None:
        raise ValueError("an unknown message")
    return read(inner[1:])


def _malformed(text: bytes, error: Exception) -> MalformedMessageError:
    reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
    return MalformedMessageError(_find_transaction_id(text), ErrorCode.SERDE_ERROR, reason)


def _find_transaction_id(text: bytes) -> int | None:
    """Return the transaction id of what is no message, if it is JSON enough to have one."""
    try:
        members = _decode_any(text)
    except READ_ERRORS:
        return None
    for inner in members.values():
        number = inner.get("transactionId") if type(inner) is dict else None
        if type(number) is int and 0 <= number <= INTEGER_MAX:
            return number
    return None


class LineDecoder:
    """Cuts the bytes of one TCP or unix client into messages: lines that end in LF or CR LF, empty ones ignored.

    Args:
        line_bytes_max: longest line, its LF not counted; one byte more is refused before the line is complete.

    Attributes:
        error: why nothing more can be read; close the connection when `messages` has returned the last messages.
    """

    def __init__(self, *, line_bytes_max: int) -> None:
        self.error: MalformedMessageError | None = None
        self._line_bytes_max = line_bytes_max
        self._lines: list[bytes] = []
        self._chunks: list[bytes] = []
        """The line that is not complete."""
        self._open_bytes = 0

    def receive_data(self, data: bytes) -> None:
        """Receive what the transport read, cut anywhere; parse it with `messages`."""
        if self.error is not None:
            return
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines:
            if self._chunks:
                lines[0] = b"".join((*self._chunks, lines[0]))
                self._chunks, self._open_bytes = [], 0
            self._lines += lines
        if rest:
            self._chunks.append(rest)
            self._open_bytes += len(rest)

    @property
    def unfinished_bytes(self) -> int:
        """Memory of the line that is not complete."""
        return self._open_bytes + PART_BYTES * len(self._chunks) if self._open_bytes else 0

    def fail(self, error: MalformedMessageError) -> None:
        """Read nothing more, and drop the line that is not complete."""
        self.error = error
        self._lines.clear()
        self._chunks.clear()
        self._open_bytes = 0

    def messages(self) -> list[ClientMessage] | SetRun:
        """Return the complete messages that have arrived, in order; an incomplete line waits for more data.

        Messages that were whole before the peer broke the protocol are returned first, with `error` set; carry them
        out, then close.

        Raises:
            MalformedMessageError: the peer broke the protocol and there is no message left to return.
        """
        if self.error is not None:
            raise self.error
        lines, self._lines = self._lines, []
        size_max = self._line_bytes_max
        too_long = self._open_bytes > size_max
        if lines and max(map(len, lines)) > size_max:
            too_long = True
            lines = lines[: next(number for number, line in enumerate(lines) if len(line) > size_max)]
        run = decode_chunk(lines)
        messages: list[ClientMessage] = []
        try:
            if run is None:
                decode_messages([line for line in lines if line not in _EMPTY], messages)
            if too_long:
                raise MalformedMessageError(None, ErrorCode.SERDE_ERROR, f"a line of over {size_max} bytes")
        except MalformedMessageError as error:
            self.fail(error)
            if run is None and not messages:
                raise
        return run or messages


def encode_welcome(client_id: str, info: ServerInfo) -> bytes:
    """Return the first message of the server, since 0.7; `Profile.info` makes `info`."""
    return b'{"welcome":{"info":%b,"clientId":%b}}' % (encode_info(info), text_json(client_id))


def encode_info(info: ServerInfo) -> bytes:
    """Return the information about the server in `welcome` and `/info`."""
    return _encode_json(info)


def encode_handshake(version: Version, separator: str = "/", wildcard: str = "?", multi_wildcard: str = "#") -> bytes:
    """Return the answer to a handshake (0.3 to 0.6)."""
    return (
        b'{"handshake":{"protocolVersion":{"major":%d,"minor":%d},"separator":%b,"wildcard":%b,"multiWildcard":%b}}'
        % (*version, text_json(separator), text_json(wildcard), text_json(multi_wildcard))
    )


def encode_ack(transaction_id: int) -> bytes:
    """Return the answer to a request that is done."""
    return b'{"ack":{"transactionId":%d}}' % transaction_id


def encode_error(transaction_id: int, code: int, text: str) -> bytes:
    """Return the answer to a request that is not done; the text becomes JSON in a JSON string (section 6)."""
    metadata = text_json(text_json(text).decode())
    return b'{"err":{"transactionId":%d,"errorCode":%d,"metadata":%b}}' % (transaction_id, code, metadata)


def encode_state(transaction_id: int, value: bytes, key: str | None = None, *, deleted: bool = False) -> bytes:
    """Return a value, or the one that a key had; with its key in profiles where `state` carries the pair."""
    return state_head(transaction_id) + state_tail(value, key, deleted=deleted)


def state_head(transaction_id: int) -> bytes:
    """Return the part of a `state` before its tail."""
    return b'{"state":{"transactionId":%d,' % transaction_id


def state_tail(value: bytes, key: str | None = None, *, deleted: bool = False) -> bytes:
    """Return the part that the `state` messages of one event share; with the key in profiles that carry the pair."""
    if key is None:
        return b'"deleted":%b}}' % value if deleted else b'"value":%b}}' % value
    return b'"%b":{"key":%b,"value":%b}}}' % (b"deleted" if deleted else b"keyValue", text_json(key), value)


def encode_cstate(transaction_id: int, value: bytes, version: int) -> bytes:
    """Return a value and its version."""
    return b'{"cState":{"transactionId":%d,"value":%b,"version":%d}}' % (transaction_id, value, version)


def encode_pstate(
    transaction_id: int, pattern: str, pairs: Iterable[tuple[str, bytes]], *, deleted: bool = False
) -> bytes:
    """Return keys with their values, or those that they had; the pattern exactly as the client sent it."""
    return pstate_head(transaction_id, pattern) + pstate_tail(pairs, deleted=deleted)


def pstate_head(transaction_id: int, pattern: str) -> bytes:
    """Return the part of a `pState` before its tail."""
    return b'{"pState":{"transactionId":%d,"requestPattern":%b,' % (transaction_id, text_json(pattern))


def pstate_tail(pairs: Iterable[tuple[str, bytes]], *, deleted: bool = False) -> bytes:
    """Return the part that the `pState` messages of one event share."""
    return _MEMBERS[deleted] + encode_pairs(pairs) + b"}}"


def encode_event(pairs: Iterable[tuple[str, bytes]], *, deleted: bool = False) -> bytes:
    """Return pairs as server-sent events have them: the members of a `pState` without ids."""
    return b"{%b%b}" % (_MEMBERS[deleted], encode_pairs(pairs))


_MEMBERS = {False: b'"keyValuePairs":', True: b'"deleted":'}


def encode_pairs(pairs: Iterable[tuple[str, bytes]]) -> bytes:
    """Return pairs as a JSON array."""
    return b"[%b]" % b",".join([b'{"key":%b,"value":%b}' % (text_json(key), value) for key, value in pairs])


def encode_ls(transaction_id: int, children: Iterable[str]) -> bytes:
    """Return the names below a key."""
    return b'{"lsState":{"transactionId":%d,"children":%b}}' % (transaction_id, encode_names(children))


def encode_names(names: Iterable[str]) -> bytes:
    """Return names as a JSON array."""
    return b"[%b]" % b",".join(map(text_json, names))
