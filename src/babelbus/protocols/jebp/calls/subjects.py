"""Subjects, patterns and headers that clients of calls name."""

from typing import Final

from babelbus.core.access import Identity
from babelbus.core.state import size_fault
from babelbus.core.subject import PathPattern
from babelbus.core.topic import RESERVED_PREFIX
from babelbus.protocols.jebp.calls.errors import CallRefusedError
from babelbus.records.envelope import SOURCE_HEADER, SUBJECT_HEADER
from babelbus.records.plain import HEADERS_MAX, RESERVED_HEADER_PREFIX
from babelbus.records.record import Headers

ONE: Final = frozenset(("+", "?"))
REST: Final = "#"


def read_pattern(text: str, bytes_max: int) -> PathPattern:
    """Return the pattern of a text.

    Raises:
        CallRefusedError: it is empty, too long, or `#` stands in the middle.
    """
    fault = size_fault(text, bytes_max)
    elements = text.split("/")
    if not text or fault is not None or REST in elements[:-1]:
        reason = fault or "'#' stands only at the end, + is one element"
        raise CallRefusedError("bad_argument", f"{text[:80]!r} is no pattern: {reason}")
    rest = elements[-1] == REST
    if rest:
        elements.pop()
    return PathPattern(tuple([None if element in ONE else element for element in elements]), rest)


def check_subject(subject: str, bytes_max: int) -> None:
    """Check that a client may use a subject.

    Raises:
        CallRefusedError: it is empty, too long or the server's own.
    """
    fault = size_fault(subject, bytes_max)
    if not subject or subject.startswith(RESERVED_PREFIX):
        fault = f"is empty or the server's own ({RESERVED_PREFIX}...)"
    if fault is not None:
        raise CallRefusedError("bad_argument", f"the subject {subject[:80]!r} {fault}")


def signed(headers: Headers, principal: Identity) -> Headers:
    """Return the headers of a client with its source.

    Raises:
        CallRefusedError: there are too many, or one is the server's own.
    """
    if len(headers) >= HEADERS_MAX - 1:
        raise CallRefusedError("bad_argument", f"{len(headers)} headers, the most are {HEADERS_MAX - 2}")
    for name, _ in headers:
        if name in (SOURCE_HEADER, SUBJECT_HEADER) or name.startswith(RESERVED_HEADER_PREFIX):
            raise CallRefusedError("bad_argument", f"the header {name!r} is the server's own")
    return (*headers, (SOURCE_HEADER, principal.source.encode()))
