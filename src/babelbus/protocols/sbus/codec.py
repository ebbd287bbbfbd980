"""Packets <-> messages of sbus (docs/specifications/sbus.md, sections 2, 3 and 11).

packet := word " " key [NUL tail]; word is SUB, UNSUB, MSG or CMSG; key is any bytes but NUL, and may be empty. One
packet is one message. The *head* is what stands before the NUL: it says all that the bus has to know.
"""

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX, WHOAMI, Control, Message, Publish, Subscribe, Unsubscribe

MSG = b"MSG "
SUB = b"SUB "
UNSUB = b"UNSUB "
CMSG = b"CMSG "


def decode(packet: bytes) -> Message:
    """Read one packet.

    Raises:
        RemoteProtocolError: no word of sbus begins it, or it is too long; the peer is disconnected.
    """
    if len(packet) > PACKET_BYTES_MAX:
        raise RemoteProtocolError(f"a packet of {len(packet)} bytes, limit {PACKET_BYTES_MAX}")
    head, nul, tail = packet.partition(b"\0")
    if head.startswith(MSG):
        return Publish(head[len(MSG) :], tail if nul else None)
    return decode_head(head, tail)


def decode_head(head: bytes, tail: bytes = b"") -> Subscribe | Unsubscribe | Control:
    """Read the head of a packet that is no MSG.

    Raises:
        RemoteProtocolError: no word of sbus begins it.
    """
    if head.startswith(SUB):
        return Subscribe(head[len(SUB) :])
    if head.startswith(UNSUB):
        return Unsubscribe(head[len(UNSUB) :])
    if head.startswith(CMSG):
        return Control(head[len(CMSG) :], tail)
    raise RemoteProtocolError(f"a packet that begins with {head[:8]!r}")


def encode(message: Message) -> bytes:
    """Return the packet that says `message`, byte for byte as libsbus makes it (section 18).

    Raises:
        LocalProtocolError: a key has a NUL, or the packet would be too long.
    """
    key = message.pattern if isinstance(message, Subscribe | Unsubscribe) else message.key
    if b"\0" in key:
        raise LocalProtocolError("an sbus key has no NUL")
    match message:
        case Subscribe():
            packet = SUB + key
        case Unsubscribe():
            packet = UNSUB + key
        case Publish():
            packet = MSG + key if message.payload is None else b"%b%b\0%b" % (MSG, key, message.payload)
        case Control():
            packet = b"%b%b\0%b" % (CMSG, key, message.payload)
    if len(packet) > PACKET_BYTES_MAX:
        raise LocalProtocolError(f"an sbus packet of {len(packet)} bytes, limit {PACKET_BYTES_MAX}")
    return packet


def encode_whoami(gid: int, uid: int, pid: int) -> bytes:
    """Return the answer to `!/cred/whoami`: decimal, the group first, no NUL at the end."""
    return encode(Control(WHOAMI, b"!/cred/%d/%d/%d" % (gid, uid, pid)))
