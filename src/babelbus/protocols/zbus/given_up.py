"""Which stored messages are calls that nobody waits for any more: none is handed out.

Specification: docs/specifications/zbus.md, 6.3.
"""

from collections.abc import Collection, Sequence

from babelbus.core.groups import Delivery, Rows, Run
from babelbus.core.record import Headers
from babelbus.records.envelope import ID_HEADER, SOURCE_HEADER
from babelbus.records.headers import read_headers

SourceAndId = tuple[str, str]


def without(messages: Sequence[Delivery], given_up: Collection[SourceAndId]) -> Sequence[Delivery]:
    """Return the messages for whose answer somebody may still wait."""
    if not isinstance(messages, Run):
        return [one for one in messages if _caller(one.headers) not in given_up]
    callers = messages.rows.made(_callers)
    numbers = [number for number in messages.numbers if callers[number] not in given_up]
    return messages if len(numbers) == len(messages) else messages.only(numbers)


def _callers(rows: Rows) -> list[SourceAndId]:
    """Return source and id of each message of a chunk; headers behind the id are read once for all that share them."""
    found = rows.leading(ID_HEADER)
    rests = found.rests()
    known = {rest: read_headers(rest) for rest in set(rests)}
    callers = {
        number: _caller(((ID_HEADER, value), *known[rest]))
        for number, value, rest in zip(found.numbers, found.values(), rests, strict=True)
    }
    return [
        callers[number] if number in callers else _caller(rows.record(number).headers) for number in range(rows.count)
    ]


def _caller(headers: Headers) -> SourceAndId:
    source = request_id = b""
    for name, value in headers:
        if name == SOURCE_HEADER:
            source = value or b""
        elif name == ID_HEADER:
            request_id = value or b""
    return source.rpartition(b"#")[2].decode("utf-8", "replace"), request_id.decode("utf-8", "replace")
