"""JSON texts <-> messages of Wörterbuch as a server needs them (docs/specifications/worterbuch.md, 4 to 6 and 13).

Every message is an object with one member, whose name is the message. The usual spelling, with no blank before the
inner object, is found by its first bytes and read by a typed decoder; anything else takes the general path. Encoders
give JSON without a line end; keys, patterns and texts leave in ASCII, values as they are stored (`values.ascii_json`
for TCP and unix). What all receivers of an event share is a *tail*, made once: message = head + tail.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from babelbus.protocols.worterbuch.errors import ErrorCode, MalformedMessageError
from babelbus.protocols.worterbuch.messages import ClientMessage, Keepalive, ServerInfo, SetRun, Version
from babelbus.protocols.worterbuch.readers import LINE_READERS, READ_ERRORS, READERS, read_set_run
from babelbus.protocols.worterbuch.values import INTEGER_MAX, text_json

KEEPALIVE = b'""'
AUTHORIZED = b'{"authorized":{"transactionId":0}}'
AUTHENTICATED = b'{"authenticated":{"transactionId":0}}'

_SET = b'{"set":'
_RUN_BYTES_MIN = 2048  # below it, setting up a run costs more than it saves
_RUN_TEXTS_MIN = 16
PART_BYTES = 256
"""Memory of a part of a line beside its bytes: a peer may send single bytes."""
_BLANKS = b" \t\r\n"
_BRACE = ord("}")
_STARTS = {b'{"%b":' % name.encode(): read for name, read in READERS.items()}
_RUN_STARTS = {b'{"%b":' % name.encode(): read for name, read in LINE_READERS.items()}

_decode_name = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode
_encode_json = msgspec.json.Encoder().encode


def decode_message(text: bytes) -> ClientMessage:
    """Read the one message of a WebSocket text or of a line.

    Raises:
        MalformedMessageError: it is none (section 4), with the transaction id if one can be read.
    """
    try:
        return _decode(text)
    except READ_ERRORS as error:
        raise _malformed(text, error) from error


def decode_messages(texts: Sequence[bytes], messages: list[ClientMessage]) -> None:
    """Read the WebSocket texts of one chunk, each one message, and append them; a long run of one kind together.

    Raises:
        MalformedMessageError: a text is none; `messages` has those before it.
    """
    if len(texts) >= _RUN_TEXTS_MIN:
        run = _read_run(b"\n".join(texts) + b"\n")
        if len(run) == len(texts):  # not so if a text holds several lines
            messages += run
            return
    for text in texts:
        messages.append(decode_message(text))


def decode_sets(texts: Sequence[bytes]) -> SetRun | None:
    """Return the WebSocket texts of one chunk if they are many and nothing but sets, else `None`."""
    if len(texts) < _RUN_TEXTS_MIN or not texts[0].startswith(_SET) or not texts[-1].startswith(_SET):
        return None
    run = _read_sets(b"\n".join(texts) + b"\n")
    return run if run is not None and len(run.keys) == len(texts) else None


def _read_sets(lines: bytes) -> SetRun | None:
    """Return the sets of complete lines if they are nothing else, in their usual spelling."""
    try:
        if not lines.isascii():
            lines.decode()
        return read_set_run(lines)
    except READ_ERRORS:  # perhaps only mixed: line by line finds what is wrong, if anything is
        return None


def _decode(text: bytes) -> ClientMessage:
    if not text.isascii():
        text.decode()
    end = text.find(b'"', 2) + 2
    read = _STARTS.get(text[:end])
    if read is not None and text[-1] == _BRACE:
        return read(text[end:-1])  # what follows the inner object, a second member too, is no JSON there
    return _decode_unusual(text)


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
        error: why nothing more can be read; the connection is to be closed when `messages` has given the last ones.
    """

    def __init__(self, *, line_bytes_max: int) -> None:
        self.error: MalformedMessageError | None = None
        self._line_bytes_max = line_bytes_max
        self._chunks: list[bytes] = []
        self._open_bytes = 0  # of the line that is not complete
        self._complete = False

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what the transport read, cut anywhere; parse it with `messages`."""
        if data and self.error is None:
            chunk = data if type(data) is bytes else bytes(data)
            self._chunks.append(chunk)
            end = chunk.rfind(b"\n") + 1
            if end:
                self._complete = True
                self._open_bytes = len(chunk) - end
            else:
                self._open_bytes += len(chunk)

    def sets(self) -> SetRun | None:
        """Return the complete messages that have arrived if they are many and nothing but sets, else `None`.

        Ask before `messages`, which then has the rest.
        """
        if not self._complete or not self._chunks[0].startswith(_SET):
            return None
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        end = data.rfind(b"\n") + 1
        if not _RUN_BYTES_MIN <= end <= self._line_bytes_max or not data.startswith(
            _SET, data.rfind(b"\n", 0, end - 1) + 1
        ):
            return None
        run = _read_sets(data[:end] if end < len(data) else data)
        if run is not None:
            self._chunks = [data[end:]] if end < len(data) else []
            self._complete = False
        return run

    def messages(self) -> list[ClientMessage]:
        """Return the complete messages that have arrived, in order; an incomplete line waits for more data.

        Messages that were whole before the peer broke the protocol are given first, with `error` set; carry them out,
        then close.

        Raises:
            MalformedMessageError: the peer broke the protocol and there is no message left to give.
        """
        messages: list[ClientMessage] = []
        if self.error is None:
            try:
                if self._complete:
                    self._read(messages)
                if self._open_bytes > self._line_bytes_max:
                    raise self._too_long()
            except MalformedMessageError as error:
                self.fail(error)
        if self.error is not None and not messages:
            raise self.error
        return messages

    @property
    def unfinished_bytes(self) -> int:
        """Memory of the line that is not complete."""
        return self._open_bytes + PART_BYTES * len(self._chunks) if self._open_bytes else 0

    def fail(self, error: MalformedMessageError) -> None:
        """Read nothing more, and drop the line that is not complete."""
        self.error = error
        self._chunks.clear()
        self._open_bytes = 0
        self._complete = False

    def _too_long(self) -> MalformedMessageError:
        return MalformedMessageError(None, ErrorCode.SERDE_ERROR, f"a line of over {self._line_bytes_max} bytes")

    def _read(self, messages: list[ClientMessage]) -> None:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._complete = False
        end = data.rfind(b"\n") + 1
        if end < len(data):
            chunks.append(data[end:])
            data = data[:end]
        if _RUN_BYTES_MIN <= end <= self._line_bytes_max:
            run = _read_run(data)
            if run:
                messages += run
                return
        for line in data[:-1].split(b"\n"):
            if len(line) > self._line_bytes_max:
                raise self._too_long()
            line = line.removesuffix(b"\r")
            if line:
                messages.append(decode_message(line))


def _read_run(lines: bytes) -> Sequence[ClientMessage]:
    """Return the messages of complete lines if they all are the same one in its usual spelling, else none."""
    read_lines = _RUN_STARTS.get(lines[: lines.find(b'"', 2) + 2])
    if read_lines is None:
        return ()
    try:
        if not lines.isascii():
            lines.decode()
        return read_lines(lines)
    except READ_ERRORS:  # perhaps only mixed: line by line finds what is wrong, if anything is
        return ()


def encode_welcome(client_id: str, info: ServerInfo) -> bytes:
    """Return the first message of the server, since 0.7; `Profile.info` makes `info`."""
    return b'{"welcome":{"info":%b,"clientId":%b}}' % (encode_info(info), text_json(client_id))


def encode_info(info: ServerInfo) -> bytes:
    """Return what `welcome` and `/info` tell of the server."""
    return _encode_json(info)


def encode_handshake(version: Version, separator: str = "/", wildcard: str = "?", multi_wildcard: str = "#") -> bytes:
    """Return the answer to a handshake (0.3 to 0.6)."""
    return (
        b'{"handshake":{"protocolVersion":{"major":%d,"minor":%d},"separator":%b,"wildcard":%b,"multiWildcard":%b}}'
        % (*version, text_json(separator), text_json(wildcard), text_json(multi_wildcard))
    )


def encode_authorized() -> bytes:
    """Return the answer to a JWT that was accepted."""
    return AUTHORIZED


def encode_authenticated() -> bytes:
    """Return the answer to a hash that was accepted (servers 0.42)."""
    return AUTHENTICATED


def encode_ack(transaction_id: int) -> bytes:
    """Return the answer to a request that is done."""
    return b'{"ack":{"transactionId":%d}}' % transaction_id


def encode_error(transaction_id: int, code: int, text: str) -> bytes:
    """Return the answer to a request that is not done; the text becomes JSON in a JSON string (section 6)."""
    metadata = text_json(text_json(text).decode())
    return b'{"err":{"transactionId":%d,"errorCode":%d,"metadata":%b}}' % (transaction_id, code, metadata)


def encode_state(transaction_id: int, value: bytes, key: str | None = None) -> bytes:
    """Return a value; with its key in profiles where `state` carries the pair."""
    return state_head(transaction_id) + state_tail(value, key)


def encode_state_deleted(transaction_id: int, value: bytes, key: str | None = None) -> bytes:
    """Return the value that a key had; with the key in profiles where `state` carries the pair."""
    return state_head(transaction_id) + state_deleted_tail(value, key)


def state_head(transaction_id: int) -> bytes:
    """Return what stands before the tail of a `state`."""
    return b'{"state":{"transactionId":%d,' % transaction_id


def state_tail(value: bytes, key: str | None = None) -> bytes:
    """Return what the `state` messages of one value share; with its key in profiles that carry the pair."""
    if key is None:
        return b'"value":%b}}' % value
    return b'"keyValue":{"key":%b,"value":%b}}}' % (text_json(key), value)


def state_deleted_tail(value: bytes, key: str | None = None) -> bytes:
    """Return what the `state` messages of one deletion share; with the key in profiles that carry the pair."""
    if key is None:
        return b'"deleted":%b}}' % value
    return b'"deleted":{"key":%b,"value":%b}}}' % (text_json(key), value)


def encode_cstate(transaction_id: int, value: bytes, version: int) -> bytes:
    """Return a value and its version."""
    return b'{"cState":{"transactionId":%d,"value":%b,"version":%d}}' % (transaction_id, value, version)


def encode_pstate(transaction_id: int, pattern: str, pairs: Iterable[tuple[str, bytes]]) -> bytes:
    """Return keys with their values; the pattern exactly as the client sent it."""
    return b'%b"keyValuePairs":[%b]}}' % (pstate_head(transaction_id, pattern), _pairs(pairs))


def encode_pstate_deleted(transaction_id: int, pattern: str, pairs: Iterable[tuple[str, bytes]]) -> bytes:
    """Return keys with the values that they had."""
    return b'%b"deleted":[%b]}}' % (pstate_head(transaction_id, pattern), _pairs(pairs))


def pstate_head(transaction_id: int, pattern: str) -> bytes:
    """Return what stands before the tail of a `pState`."""
    return b'{"pState":{"transactionId":%d,"requestPattern":%b,' % (transaction_id, text_json(pattern))


def pstate_tail(key: str, value: bytes) -> bytes:
    """Return what the `pState` messages of one event share."""
    return b'"keyValuePairs":[{"key":%b,"value":%b}]}}' % (text_json(key), value)


def pstate_deleted_tail(key: str, value: bytes) -> bytes:
    """Return what the `pState` messages of one deletion share."""
    return b'"deleted":[{"key":%b,"value":%b}]}}' % (text_json(key), value)


def encode_pairs(pairs: Iterable[tuple[str, bytes]], *, deleted: bool = False) -> bytes:
    """Return pairs as server-sent events have them: what a `pState` holds besides ids."""
    return b'{"deleted":[%b]}' % _pairs(pairs) if deleted else b'{"keyValuePairs":[%b]}' % _pairs(pairs)


def encode_pair_list(pairs: Iterable[tuple[str, bytes]]) -> bytes:
    """Return pairs as REST has them."""
    return b"[%b]" % _pairs(pairs)


def _pairs(pairs: Iterable[tuple[str, bytes]]) -> bytes:
    return b",".join([b'{"key":%b,"value":%b}' % (text_json(key), value) for key, value in pairs])


def encode_ls(transaction_id: int, children: Iterable[str]) -> bytes:
    """Return the names below a key."""
    return b'{"lsState":{"transactionId":%d,"children":[%b]}}' % (transaction_id, b",".join(map(text_json, children)))
