"""What hypothesis makes of zbus: JSON values, header texts, whole messages."""

import msgspec
from hypothesis import strategies as st

from babelbus.protocols.zbus.messages import HEADER_NAMES, SECRETS, Message, canonical_name
from babelbus.protocols.zbus.stored import Recorder
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_bodies
from babelbus.records.record import Headers

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
names = (
    st.sampled_from(HEADER_NAMES) | texts.map(canonical_name) | st.sampled_from(["zbus_x", "ce_id", "ce_type", "key"])
)
headers = st.dictionaries(names, texts, max_size=6)
json_bodies = values.filter(lambda value: value is not None and not isinstance(value, str)).map(msgspec.json.encode)


def messages(headers: st.SearchStrategy[dict[str, str]] = headers) -> st.SearchStrategy[Message]:
    """Messages in the one form that each of them has."""
    rest = (headers, st.none() | texts, st.none() | texts, st.none() | st.integers(100, 999))
    return (
        st.builds(Message, *rest)
        | st.builds(Message, *rest, json_bodies, st.just("json"))
        | st.builds(Message, *rest, texts.map(str.encode), st.just("text"))
        | st.builds(Message, *rest, st.binary(max_size=30), st.just("bytes"))
    )


stored_headers = st.dictionaries(
    names.filter(lambda name: name not in SECRETS | {"cmd", "mq"} and not name.startswith("$")), texts, max_size=6
)


def to_record(message: Message, **stamp: str) -> tuple[bytes | None, bytes | None, Headers]:
    """Payload, key and headers of the record of a message that was sent with the id `i` if it has none."""
    stamp.setdefault("source", message.headers.get("source", "S"))
    ids = [message.headers.get("id", "i")]
    bodies = Recorder(stamp).encode(message, ids, [message.body or b""], 5)
    [record] = iterate(decode_chunk(bytes(encode_bodies(bodies, [5], 0).data)))
    return record.payload, record.key, record.headers


def as_stored(message: Message) -> Message:
    """The message with the headers that the connection gives it."""
    headers = {"id": "i", "source": "S", **message.headers}
    return Message(headers, message.url, message.method, message.status, message.body, message.body_kind)
