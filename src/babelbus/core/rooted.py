"""Records and events of rooted principals: the subjects inside them, with the root and without it.

Clients without a root get what is stored, byte for byte, and never come here. A record names its subject in a header if
the subject is not the topic's name, and changes of the state have their subject as key.
"""

from typing import Final

import msgspec

from babelbus.core.access.root import Root
from babelbus.core.groups import LETTER_TOPIC
from babelbus.core.record import Event
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.format import Buffer, InvalidRecordError, encode_batch
from babelbus.records.ingest import parse_records
from babelbus.records.record import Headers, Record

NAMING: Final = frozenset((SUBJECT_HEADER, LETTER_TOPIC))
"""Headers whose values are subjects, or names of topics."""


def relative_event(event: Event, root: Root) -> Event:
    """Return an event as a principal with this root sees it."""
    key, subject = event.key, event.subject
    if key is not None and key == _bytes(subject):
        key = _bytes(root.relative(subject))
    return msgspec.structs.replace(event, subject=root.relative(subject), key=key)


def relative_key(key: bytes | None, root: Root) -> bytes | None:
    """Return the key of a record as a principal with this root sees it: a key below the root is a subject."""
    return None if key is None else key.removeprefix(_bytes(root.prefix))


def relative_headers(headers: Headers, root: Root) -> Headers:
    """Return the headers of a record as a principal with this root sees them."""
    prefix = _bytes(root.prefix)
    return tuple(
        (name, value.removeprefix(prefix) if name in NAMING and value is not None else value) for name, value in headers
    )


def relative_record(record: Record, root: Root) -> Record:
    """Return a record as a principal with this root sees it."""
    key, headers = relative_key(record.key, root), relative_headers(record.headers, root)
    return Record(record.payload, key, headers, record.timestamp, record.attributes, record.offset)


def relative_chunk(data: Buffer, root: Root) -> Buffer:
    """Return whole stored records as a principal with this root sees them, at their offsets; never more bytes."""
    if _bytes(root.prefix) not in bytes(data):
        return data
    parts: list[Buffer] = []
    run: list[Record] = []
    for record in iterate(decode_chunk(data, verified=True)):
        if run and record.offset != run[-1].offset + 1:
            parts.append(encode_batch(run, run[0].offset).data)
            run = []
        run.append(relative_record(record, root))
    parts.append(encode_batch(run, run[0].offset).data)
    return b"".join(parts)


def absolute_batch(data: Buffer, topic: str, root: Root) -> Buffer:
    """Return records in the stored form that a principal with this root sends to a topic, with absolute subjects.

    `topic` is the name that the principal uses. Records with a fault stay: whoever stores them refuses them.
    """
    if SUBJECT_HEADER not in bytes(data):
        return data
    try:
        batch = parse_records(data)
    except InvalidRecordError:
        return data
    records = list(iterate(decode_chunk(bytes(batch.data), verified=True)))
    return encode_batch([_absolute(record, topic, root) for record in records]).data


def _absolute(record: Record, topic: str, root: Root) -> Record:
    """Return a record whose header of the subject, if it names one below the topic, is absolute."""
    inside, prefix = _bytes(f"{topic}/"), _bytes(root.prefix)
    headers: list[tuple[bytes, bytes | None]] = []
    for name, value in record.headers:
        is_subject = name == SUBJECT_HEADER and value is not None and value.startswith(inside)
        headers.append((name, prefix + value if is_subject and value is not None else value))
    return msgspec.structs.replace(record, headers=tuple(headers))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
