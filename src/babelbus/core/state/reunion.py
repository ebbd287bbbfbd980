"""After a crash: which keys of the state a topic that records them does not know the last value of.

A change is appended to the log of the state and to the topics that record its key in one turn of the event loop, and is
acknowledged when all have it. A kill or a loss of power may leave a change that was not acknowledged in the log alone;
then the topic gets it when the server starts. An event in a topic that the log has not is one more publication that
was not acknowledged: the state does not follow it.
"""

from collections.abc import Callable, Iterator

from babelbus.core.json_text import json_text
from babelbus.core.partition import Partition
from babelbus.core.record import Event, Record
from babelbus.core.topic import Topic, event_of
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import CorruptRecordError

TAIL_RECORDS = 4096
"""How far from the end of a partition a crash may have left a change that was not acknowledged."""
READ_BYTES = 2**20


def missing_keys(
    changed: Iterator[str], find: Callable[[str], bytes | None], topic_of: Callable[[str], Topic | None]
) -> list[str]:
    """Return those of the changed keys whose topic ends with another value, or with none.

    `find` returns the value that a key has in the state.
    """
    tails: dict[str, dict[str, set[bytes | None]]] = {}
    missing = []
    for key in dict.fromkeys(changed):
        topic = topic_of(key)
        if topic is None:
            continue
        tail = tails.get(topic.name)
        if tail is None:
            tail = tails[topic.name] = _last_values(topic)
        if find(key) not in tail.get(key, ()):
            missing.append(key)
    return missing


def _last_values(topic: Topic) -> dict[str, set[bytes | None]]:
    """Return the values that the last event under each subject gives its key, one for each partition that has some.

    An event that a topic retains is recorded as it was published, and is JSON in the state alone. Events of one subject
    with different keys are in different partitions, which do not tell which of them was the last.
    """
    found: dict[str, set[bytes | None]] = {}
    for partition in topic.partitions:
        last: dict[str, Event] = {}
        for record in tail_of(partition):
            event = event_of(topic.name, record)
            last[event.subject] = event
        for subject, event in last.items():
            payload = event.payload
            found.setdefault(subject, set()).add(None if payload is None else json_text(payload, event.headers))
    return found


def tail_of(partition: Partition, start: int = 0) -> Iterator[Record]:
    """Yield the last records of a partition from an offset on; damaged records are left out."""
    offset = max(start, partition.high_watermark - TAIL_RECORDS, partition.log.first_offset)
    end = partition.high_watermark
    while offset < end:
        try:
            chunk = partition.log.read(offset, READ_BYTES, end)  # at a start, before anybody is served
        except CorruptRecordError as error:
            offset = max(offset + 1, error.after)
            continue
        yield from iterate(decode_chunk(chunk.data, verified=True))
        offset = chunk.next_offset
