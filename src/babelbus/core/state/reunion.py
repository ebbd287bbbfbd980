"""After a crash: which keys of the state a topic that records them does not know the last value of.

A change is appended to the log of the state and to the topics that record its key in one turn of the event loop, and is
acknowledged when all have it. A kill or a loss of power may leave a change that was not acknowledged in the log alone;
then the topic gets it when the server starts. An event in a topic that the log has not is one more publication that
was not acknowledged: the state does not follow it.
"""

from collections.abc import Callable, Iterator

from babelbus.core.partition import Partition
from babelbus.core.record import Record
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
    tails: dict[str, dict[str, bytes | None]] = {}
    missing = []
    for key in dict.fromkeys(changed):
        topic = topic_of(key)
        if topic is None:
            continue
        tail = tails.get(topic.name)
        if tail is None:
            tail = tails[topic.name] = _last_payloads(topic)
        if key not in tail or tail[key] != find(key):
            missing.append(key)
    return missing


def _last_payloads(topic: Topic) -> dict[str, bytes | None]:
    """Return the payload of the last event under each subject that the end of a topic has."""
    found: dict[str, bytes | None] = {}
    for partition in topic.partitions:
        for record in tail_of(partition):
            event = event_of(topic.name, record)
            found[event.subject] = event.payload
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
