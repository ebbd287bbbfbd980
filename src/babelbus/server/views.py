"""A record as the clients of each protocol get it, made by the encoders of the protocols, for the console."""

from collections.abc import Callable

from babelbus.core.record import Event
from babelbus.core.subject import is_secret
from babelbus.protocols.eventmesh.records import encode_body
from babelbus.protocols.jebp.codec import batch_head
from babelbus.protocols.sbus.codec import MSG
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX
from babelbus.protocols.sbus.patterns import key_of
from babelbus.protocols.worterbuch.codec import encode_pstate
from babelbus.protocols.worterbuch.hub import foreign_value
from babelbus.protocols.zbus.codec import delivery_head, delivery_tail, encode_deliveries
from babelbus.protocols.zbus.heads import stored_id
from babelbus.protocols.zbus.records import from_record
from babelbus.web.views import NoViewError, StoredRecord

Encode = Callable[[StoredRecord, Event], bytes]


def _as_jebp(stored: StoredRecord, _event: Event) -> bytes:
    """Return the batch of the answer to a fetch."""
    return batch_head(stored.topic, stored.partition, len(stored.data)) + stored.data


def _as_zbus(stored: StoredRecord, event: Event) -> bytes:
    """Return the frame of a delivery to the channel of the name of the topic."""
    record, topic = stored.record, stored.topic
    message = from_record(record.payload, record.key, record.headers, topic)
    if "id" not in message.headers:
        message.headers["id"] = stored_id(stored.absolute_topic, stored.topic_id, stored.partition, record.offset)
    return encode_deliveries([delivery_head(message, topic, record.offset)], delivery_tail(topic), None)[0]


def _as_worterbuch(_stored: StoredRecord, event: Event) -> bytes:
    """Return the line for a client that subscribed to the subject as a pattern."""
    if is_secret(event.subject):
        raise NoViewError("Keys of this name are secret; clients of Wörterbuch do not see them.")
    if any("\ud800" <= letter <= "\udfff" for letter in event.subject):
        raise NoViewError("The subject is not UTF-8; clients of Wörterbuch do not get this record.")
    return encode_pstate(1, event.subject, [(event.subject, foreign_value(event))])


def _as_sbus(_stored: StoredRecord, event: Event) -> bytes:
    key = key_of(event.subject)
    packet = b"" if key is None else b"%b%b\0%b" % (MSG, key, event.payload or b"")
    if key is None or len(packet) > PACKET_BYTES_MAX:
        raise NoViewError("sbus cannot express this record: the subject has a NUL, or the packet is too large.")
    return packet


def _as_eventmesh(stored: StoredRecord, _event: Event) -> bytes:
    return encode_body(stored.topic, stored.record.payload, stored.record.headers, {}, strict=False)[1]


VIEWS: dict[str, Encode] = {
    "jebp": _as_jebp,
    "zbus": _as_zbus,
    "worterbuch": _as_worterbuch,
    "sbus": _as_sbus,
    "eventmesh": _as_eventmesh,
}
