"""The views of one record: what the client of each protocol gets, from encoders that the server brings."""

import base64
from collections.abc import Callable, Mapping

import msgspec

from babelbus.core.record import Event
from babelbus.core.topic import event_of
from babelbus.errors import BabelbusError
from babelbus.records.record import Record

RECORD_BYTES_MAX = 256 * 1024
"""A larger record has no views: to encode it for all protocols would hold up the server."""
VIEW_BYTES_MAX = 64 * 1024
UNSET = msgspec.UNSET


class NoViewError(BabelbusError):
    """A protocol cannot express the record; the message says why."""


class StoredRecord(msgspec.Struct, frozen=True):
    """A record with its stored form and its place. Names and headers are as the principal that looks knows them."""

    topic: str
    absolute_topic: str
    topic_id: str
    partition: int
    record: Record
    data: bytes


class View(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bytes on the wire as text, or as base64 if they are no UTF-8; `note` says why there are none."""

    text: str | msgspec.UnsetType = UNSET
    b64: str | msgspec.UnsetType = UNSET
    bytes: int = 0
    clipped: bool = False
    note: str = ""


Encoders = Mapping[str, Callable[[StoredRecord, Event], bytes]]


def views_of(stored: StoredRecord, encoders: Encoders) -> dict[str, View]:
    """Return the view of each protocol."""
    if len(stored.data) > RECORD_BYTES_MAX:
        note = f"The record has {len(stored.data)} bytes; views are made of records up to {RECORD_BYTES_MAX} bytes."
        return {name: View(note=note) for name in encoders}
    event = event_of(stored.topic, stored.record)
    return {name: _view(encode, stored, event) for name, encode in encoders.items()}


def _view(encode: Callable[[StoredRecord, Event], bytes], stored: StoredRecord, event: Event) -> View:
    try:
        data = encode(stored, event)
    except NoViewError as error:
        return View(note=str(error))
    clipped, size = data[:VIEW_BYTES_MAX], len(data)
    try:
        text = clipped.decode()
        if "\0" not in text:
            return View(text, bytes=size, clipped=size > VIEW_BYTES_MAX)
    except UnicodeDecodeError:
        pass
    return View(b64=base64.b64encode(clipped).decode(), bytes=size, clipped=size > VIEW_BYTES_MAX)
