"""Bytes <-> frames of a link (docs/cluster.md, "The link").

frame := payload_bytes: u32, kind: u8, connection: u32, taken: u32, payload; big-endian

`taken` counts bytes of the connection that the sender of the frame has passed on since it last said so: data that
flows the other way is the way back of that count. In a batch, `connection` is the number of the batch.
"""

import struct
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from babelbus.errors import BabelbusError
from babelbus.units import KIB

T = TypeVar("T")

LINK_VERSION: Final = 5
HEADER: Final = struct.Struct(">IBII")
HEADER_BYTES: Final = HEADER.size
PAYLOAD_BYTES_MAX: Final = 64 * KIB
"""A longer payload is cut by its sender, or refused."""
GREETING_BYTES_MAX: Final = 4 * KIB
"""The same for the first frame of a peer that has not said who it is."""
WINDOW_BYTES: Final = 128 * KIB
"""Bytes of one client that an edge sends before the core has taken some of them."""
READ_BYTES_MAX: Final = 256 * KIB
"""Bytes of one read of asyncio, which may pass the window of its client."""
TLS_RECORD_BYTES_MAX: Final = 32 * KIB
"""More than a record of TLS, which is read whole or not at all."""
MAGIC: Final = "babelbus-link"

HELLO: Final = 1  # edge -> core: Hello
WELCOME: Final = 2  # core -> edge: Welcome
REFUSE: Final = 3  # core -> edge: text; the link is closed behind it
READY: Final = 4  # edge -> core: its listeners are open
OPEN: Final = 5  # edge -> core: Opening; a client has connected
SECURE: Final = 6  # edge -> core: Secured; the TLS handshake of the client is done
DATA: Final = 7  # both: bytes of a client, or for a client
TAKEN: Final = 8  # both: nothing but the count `taken`
BLOCKED: Final = 9  # edge -> core: the client does not take what was sent
EOF: Final = 10  # both: the client, or the session, sends nothing more
CLOSE: Final = 11  # core -> edge: close the client behind what was sent
ABORT: Final = 12  # core -> edge: close the client at once
LOST: Final = 13  # edge -> core: the client is gone; Loss
PING: Final = 14  # both: the sender is alive
RELOAD: Final = 15  # core -> edge: load the certificates again
STOP: Final = 16  # core -> edge: accept no more clients; the edge of a member also reads no more of those it has
BATCH: Final = 17  # edge -> core: requests of many clients; core -> edge: the answer to the batch
PAUSED: Final = 18  # edge of a member -> core: nothing of its clients comes behind this
CONTINUED: Final = 19  # core -> edge of a member: the next core continues the session of this client; its id
COPY: Final = 20  # core -> edge of a member: Copy of the session of this client, empty: withdrawn; edge -> next core
MARK: Final = 21  # core -> edge of a member: up to which offset its quiet clients have heard the state; MARK_FORM
COPIED: Final = 22  # edge of a member -> next core: all copies are sent
SERVES: Final = 23  # core -> edge of a member: it takes clients from now on; Serving
LAST_KIND: Final = SERVES

COPY_FORM: Final = struct.Struct(">QQQ32s")
"""Epoch of the owner, offset of the log of the state, bytes of the client so far, id; the session stands behind it."""
MARK_FORM: Final = struct.Struct(">Q")
COPY_BYTES_MAX: Final = 48 * KIB
"""Longest session that is copied."""


class LinkError(BabelbusError):
    """The other end of a link sent bytes that are no frames of it, or frames that nobody may send."""


class LinkRefusedError(BabelbusError):
    """The core refused the link; the text is the core's."""


Frame = tuple[int, int, int, bytes]
"""Kind, connection (0 where a frame is about the link), `taken`, payload."""


class Hello(msgspec.Struct, frozen=True):
    """The first frame of an edge."""

    magic: str
    version: int
    """`LINK_VERSION` of the edge."""
    name: str
    """Name of the edge: a number on the machine of the core, else the name of a member of the cluster."""
    software: str = ""
    key: str = ""
    """The key of the core, which the members of its cluster know: others could say of a client what they like."""


class ListenerInfo(msgspec.Struct, frozen=True):
    """A listener of the core, and the sockets and certificates with which an edge process opens it."""

    name: str
    descriptors: list[int] = []
    tls: bytes | None = None
    """`TlsFiles` as JSON; `None` without TLS."""
    handshake_seconds: float = 10.0


class Serving(msgspec.Struct, frozen=True):
    """The facts that an edge needs of a core that takes clients."""

    fronts: dict[str, bytes] = {}
    """By listener, the content of its `FrontPlan`, with keys: an edge has shown that it belongs to the core."""


class Welcome(msgspec.Struct, frozen=True):
    """The answer to a hello."""

    version: int
    name: str
    """Name of the core."""
    listeners: list[ListenerInfo] = []
    serving: Serving | None = None
    """There if the core takes clients at once: one that takes over gathers the copies of sessions first."""


class Copy(NamedTuple):
    """The session of a quiet client, as the owner of an epoch has it until the next byte to or from the client."""

    epoch: int
    heard: int
    """Up to which offset of the log of the state the client has heard everything."""
    received_bytes: int
    """Bytes of the client that the owner has received over this link."""
    id: str
    """32 letters; a session has another one at each owner."""
    session: bytes

    def encode(self) -> bytes:
        """Return the payload of a frame."""
        return COPY_FORM.pack(self.epoch, self.heard, self.received_bytes, self.id.encode()) + self.session


def read_copy(payload: bytes) -> Copy:
    """Return the copy of a payload.

    Raises:
        LinkError: the payload holds no copy.
    """
    if len(payload) <= COPY_FORM.size:
        raise LinkError("no copy of a session")
    epoch, heard, received_bytes, session_id = COPY_FORM.unpack_from(payload)
    return Copy(epoch, heard, received_bytes, session_id.decode("ascii", "replace"), payload[COPY_FORM.size :])


def read_mark(payload: bytes) -> int:
    """Return the offset of a mark.

    Raises:
        LinkError: the payload holds no offset.
    """
    if len(payload) != MARK_FORM.size:
        raise LinkError("no mark of a core")
    return int(MARK_FORM.unpack(payload)[0])


class Opening(msgspec.Struct, frozen=True):
    """A client that has connected to an edge."""

    listener: str
    peer: list[str | int] | None
    """Address of the client as the system says it; `None` for a client without address."""
    local: list[str | int] | None = None
    fronted: bool = False
    """Whether a front proves who the client is."""
    continues: str = ""
    """The id of the session that a core before this one has handed over."""


class Secured(msgspec.Struct, frozen=True):
    """The certificate that a client showed in its TLS handshake; both are empty if it showed no certificate."""

    certificate: bytes = b""
    """In DER."""
    fields: dict[str, Any] = {}
    """As `ssl.SSLSocket.getpeercert` returns them."""


class Loss(msgspec.Struct, frozen=True):
    """Why a client is gone: `reason` is a label of `connections_refused_total` if its handshake failed."""

    reason: str = ""
    text: str = ""


def encode(kind: int, connection: int = 0, payload: bytes = b"", taken: int = 0) -> bytes:
    """Return the bytes of a frame, whose payload is at most `PAYLOAD_BYTES_MAX` long."""
    return HEADER.pack(len(payload), kind, connection, taken) + payload


class Decoder:
    """Cuts the bytes of the other end into frames. Spent once it has raised."""

    __slots__ = ("_bytes_max", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._bytes_max = GREETING_BYTES_MAX

    def trust(self) -> None:
        """Receive payloads of full length from now on: the peer has said who it is."""
        self._bytes_max = PAYLOAD_BYTES_MAX

    def receive_data(self, data: bytes) -> list[Frame]:
        """Return the frames that are whole with some bytes, in order.

        Raises:
            LinkError: the bytes are no frames of a link.
        """
        rest = self._rest
        if rest:
            data = rest + data
        frames: list[Frame] = []
        at, size, unpack, header_bytes = 0, len(data), HEADER.unpack_from, HEADER_BYTES
        while size - at >= header_bytes:
            length, kind, connection, taken = unpack(data, at)
            if length > self._bytes_max or not 0 < kind <= LAST_KIND:
                raise LinkError(f"no frame of a link: kind {kind} with {length} bytes, limit {self._bytes_max}")
            begin = at + header_bytes
            end = begin + length
            if end > size:
                break
            frames.append((kind, connection, taken, data[begin:end]))
            at = end
        self._rest = data[at:] if at else data
        return frames


def read(payload: bytes, kind: type[T]) -> T:
    """Return the message of a payload in JSON.

    Raises:
        LinkError: the payload holds another message.
    """
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LinkError(f"no {kind.__name__} of a link: {error}") from error
