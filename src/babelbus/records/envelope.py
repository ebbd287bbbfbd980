"""Names of the headers that describe an event to every protocol; CloudEvents' Kafka binding where it has a name."""

from typing import Final

ID_HEADER: Final = b"ce_id"
SOURCE_HEADER: Final = b"ce_source"
"""Holds the protocol and the name of the publisher; the server writes it."""
SUBJECT_HEADER: Final = b"ce_subject"
"""Holds the subject of an event whose subject is not the topic's name."""
CONTENT_TYPE: Final = b"content-type"
JSON_TYPE: Final = b"application/json"
TEXT_TYPE: Final = b"text/plain; charset=utf-8"
