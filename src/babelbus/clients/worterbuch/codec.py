"""JSON texts <-> messages of Wörterbuch as a client needs them: requests go out, replies and events come in.

`codec` is the server's side. Section numbers are those of docs/specifications/worterbuch.md.
"""

from collections.abc import Callable

import msgspec

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.codec import KEEPALIVE

_UNSET = msgspec.UNSET
_REPLY_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
_encode = msgspec.json.Encoder().encode


def encode_message(message: m.ClientMessage) -> bytes:
    """Return the JSON text that says `message`, without a line end; members that may be absent are, if there is
    nothing.

    Raises:
        UnicodeEncodeError: a text has a lone surrogate.
    """
    if isinstance(message, m.Keepalive):
        return KEEPALIVE
    return _encode({_NAMES[type(message)]: _members(message)})


def _members(message: m.ClientMessage) -> object:
    match message:
        case m.Handshake(versions, last_will, grave_goods):
            return {
                "supportedProtocolVersions": [{"major": major, "minor": minor} for major, minor in versions],
                "lastWill": [{"key": key, "value": msgspec.Raw(value)} for key, value in last_will],
                "graveGoods": grave_goods,
            }
        case m.Set(number, key, value) | m.Publish(number, key, value):
            return {"transactionId": number, "key": key, "value": msgspec.Raw(value)}
        case m.CSet(number, key, value, version):
            return {"transactionId": number, "key": key, "value": msgspec.Raw(value), "version": version}
        case m.SPub(number, value):
            return {"transactionId": number, "value": msgspec.Raw(value)}
        case m.Transform(number, key, template):
            return {"transactionId": number, "key": key, "template": msgspec.Raw(template)}
        case m.Subscribe(number, key, unique, live_only):
            return {"transactionId": number, "key": key, "unique": unique, "liveOnly": live_only}
        case m.PSubscribe(number, pattern, unique, aggregate_ms, live_only):
            members = {"transactionId": number, "requestPattern": pattern, "unique": unique}
            if aggregate_ms is not None:
                members["aggregateEvents"] = aggregate_ms
            return {**members, "liveOnly": live_only}
        case m.PDelete(number, pattern, quiet):
            return {"transactionId": number, "requestPattern": pattern, "quiet": quiet}
        case _:
            return message  # looks on the wire as its type says


_NAMES: dict[type[m.ClientMessage], str] = {
    m.ProtocolSwitch: "protocolSwitchRequest",
    m.Authorization: "authorizationRequest",
    m.Authentication: "authenticationRequest",
    m.Handshake: "handshakeRequest",
    m.Get: "get",
    m.CGet: "cGet",
    m.PGet: "pGet",
    m.Set: "set",
    m.CSet: "cSet",
    m.SPubInit: "sPubInit",
    m.SPub: "sPub",
    m.Publish: "publish",
    m.Subscribe: "subscribe",
    m.PSubscribe: "pSubscribe",
    m.Unsubscribe: "unsubscribe",
    m.Delete: "delete",
    m.PDelete: "pDelete",
    m.Ls: "ls",
    m.PLs: "pLs",
    m.SubscribeLs: "subscribeLs",
    m.UnsubscribeLs: "unsubscribeLs",
    m.Lock: "lock",
    m.AcquireLock: "acquireLock",
    m.ReleaseLock: "releaseLock",
    m.Transform: "transform",
    m.Export: "export",
    m.Import: "import",
}


class _VersionText(msgspec.Struct, gc=False):
    major: int
    minor: int


class _HandshakeText(msgspec.Struct, rename="camel", gc=False):
    protocol_version: _VersionText
    separator: str = "/"
    wildcard: str = "?"
    multi_wildcard: str = "#"


class _PairText(msgspec.Struct, gc=False):
    key: str
    value: msgspec.Raw


class _StateText(msgspec.Struct, rename="camel", gc=False):
    transaction_id: int
    value: msgspec.Raw | msgspec.UnsetType = _UNSET
    deleted: msgspec.Raw | msgspec.UnsetType = _UNSET
    key_value: _PairText | msgspec.UnsetType = _UNSET


class _CStateText(msgspec.Struct, rename="camel", gc=False):
    transaction_id: int
    value: msgspec.Raw
    version: int


class _PStateText(msgspec.Struct, rename="camel", gc=False):
    transaction_id: int
    request_pattern: str
    key_value_pairs: tuple[_PairText, ...] | msgspec.UnsetType = _UNSET
    deleted: tuple[_PairText, ...] | msgspec.UnsetType = _UNSET


_decode_handshake = msgspec.json.Decoder(_HandshakeText).decode
_decode_state = msgspec.json.Decoder(_StateText).decode
_decode_cstate = msgspec.json.Decoder(_CStateText).decode
_decode_pstate = msgspec.json.Decoder(_PStateText).decode
_decode_pair = msgspec.json.Decoder(_PairText).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_ack = msgspec.json.Decoder(m.Ack).decode
_decode_metadata = msgspec.json.Decoder(str).decode


def decode_reply(text: bytes, *, pairs: bool = False) -> m.ServerMessage:
    """Read the one message of a WebSocket text or of a line.

    Args:
        text: the JSON text.
        pairs: whether `state` carries the key beside the value (0.3 to 0.9).

    Raises:
        RemoteProtocolError: it is no message of a server.
    """
    try:
        if text.startswith(b'{"ack":') and text.endswith(b"}"):
            return _decode_ack(text[7:-1])
        return _decode(text, pairs)
    except _REPLY_ERRORS as error:
        raise RemoteProtocolError(f"no message of a server: {error}") from error


def _decode(text: bytes, pairs: bool) -> m.ServerMessage:
    if text == KEEPALIVE:
        return m.Keepalive()
    text.decode()  # the library skips values without a look at their UTF-8
    members = _decode_members(text)
    if len(members) != 1:
        raise ValueError(f"{len(members)} members")
    ((name, inner),) = members.items()
    if name == "state":
        return _read_state(bytes(inner), pairs)
    read = _READERS.get(name)
    if read is None:
        raise ValueError("an unknown message")
    return read(bytes(inner))


def _read_state(text: bytes, pairs: bool) -> m.State:
    read = _decode_state(text)
    number = read.transaction_id
    if read.key_value is not _UNSET:
        return m.State(number, bytes(read.key_value.value), key=read.key_value.key)
    if read.value is not _UNSET:
        return m.State(number, bytes(read.value))
    if read.deleted is _UNSET:
        raise ValueError("a state without a value")
    if pairs:
        pair = _decode_pair(read.deleted)
        return m.State(number, bytes(pair.value), deleted=True, key=pair.key)
    return m.State(number, bytes(read.deleted), deleted=True)


def _read_cstate(text: bytes) -> m.CState:
    read = _decode_cstate(text)
    return m.CState(read.transaction_id, bytes(read.value), read.version)


def _read_pstate(text: bytes) -> m.PState:
    read = _decode_pstate(text)
    deleted = read.deleted is not _UNSET
    found = read.deleted if read.deleted is not _UNSET else read.key_value_pairs
    if found is _UNSET:
        raise ValueError("a pState without keys")
    pairs = tuple((pair.key, bytes(pair.value)) for pair in found)
    return m.PState(read.transaction_id, read.request_pattern, pairs, deleted)


def _read_handshake(text: bytes) -> m.Handshaken:
    read = _decode_handshake(text)
    version = (read.protocol_version.major, read.protocol_version.minor)
    return m.Handshaken(version, read.separator, read.wildcard, read.multi_wildcard)


_READERS: dict[str, Callable[[bytes], m.ServerMessage]] = {
    "welcome": msgspec.json.Decoder(m.Welcome).decode,
    "handshake": _read_handshake,
    "authorized": msgspec.json.Decoder(m.Authorized).decode,
    "authenticated": msgspec.json.Decoder(m.Authenticated).decode,
    "ack": _decode_ack,
    "err": msgspec.json.Decoder(m.Err).decode,
    "cState": _read_cstate,
    "pState": _read_pstate,
    "lsState": msgspec.json.Decoder(m.LsState).decode,
}


def decode_metadata(metadata: str) -> str:
    """Return the text of an `err`: JSON in a JSON string as a rule, plain text of some servers for some codes."""
    try:
        return _decode_metadata(metadata)
    except msgspec.DecodeError:
        return metadata


class ReplyDecoder:
    """Cuts the bytes of one TCP or unix server into messages. Spent once it has raised.

    Args:
        line_bytes_max: longest line, its LF not counted.
        pairs: whether `state` carries the key beside the value (0.3 to 0.9).
    """

    def __init__(self, *, line_bytes_max: int, pairs: bool = False) -> None:
        self._line_bytes_max = line_bytes_max
        self._pairs = pairs
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0

    def receive_data(self, data: bytes) -> list[m.ServerMessage]:
        """Take what the transport read, cut anywhere, and return the messages that are complete, in order.

        Raises:
            RemoteProtocolError: a line is too long, or no message of a server.
        """
        end = data.rfind(b"\n") + 1
        if not end:
            self._buffered_bytes += len(data)
            if self._buffered_bytes > self._line_bytes_max:
                raise RemoteProtocolError(f"a line of over {self._line_bytes_max} bytes")
            self._chunks.append(data)
            return []
        lines = b"".join([*self._chunks, data[: end - 1]]).split(b"\n")
        self._chunks = [data[end:]]
        self._buffered_bytes = len(data) - end
        if max(self._buffered_bytes, *map(len, lines)) > self._line_bytes_max:
            raise RemoteProtocolError(f"a line of over {self._line_bytes_max} bytes")
        return [decode_reply(line, pairs=self._pairs) for line in lines if line]
