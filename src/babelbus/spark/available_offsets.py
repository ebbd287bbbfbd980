"""The records that can be read now, and the offsets of them that the options mean. Runs on the driver."""

import logging
import re

from babelbus.spark.errors import DataLossError, NoRecordError, OptionError, UnknownTopicError
from babelbus.spark.options import EARLIEST, LATEST, Edge, SourceOptions
from babelbus.spark.plan import At, Bounds, Span
from babelbus.spark.record_source import Reach

log = logging.getLogger(__name__)


class Survey:
    """Asks the bus, and reads its answers as the options say."""

    def __init__(self, options: SourceOptions, reach: Reach) -> None:
        self._options = options
        self._reach = reach
        self.lost_records = 0
        """Number of requested offsets that were gone since this object was made, with failOnDataLoss=false."""

    def bounds(self, *, missing_ok: bool = False) -> dict[At, Bounds]:
        """Return what each partition holds that is read, by topic and number.

        With `missing_ok` a topic that is not there is left out.

        Raises:
            UnknownTopicError: a topic is missing.
            OptionError: `assign` names a partition that its topic does not have.
            BabelbusError: the bus did not answer.
        """
        topics = self._options.topics
        chosen = [*topics.names, *topics.assigned]
        if topics.pattern:
            # The bus's own topics are read only when they are named, as in Spark's Kafka source.
            listed = [name for name in self._reach.topics() if not name.startswith("$")]
            chosen = [name for name in listed if re.fullmatch(topics.pattern, name)]
        found: dict[At, Bounds] = {}
        for topic in chosen:
            try:
                partitions = self._reach.bounds(topic, topics.assigned.get(topic))
            except UnknownTopicError:
                if missing_ok or topics.pattern:  # it may have been removed since the names were listed
                    continue
                raise
            missing = set(topics.assigned.get(topic, ())) - set(partitions)
            if missing and not missing_ok:
                raise OptionError(f"option assign: topic {topic!r} has no partition {min(missing)}")
            found |= {(topic, number): bounds for number, bounds in partitions.items()}
        return found

    def is_chosen(self, at: At) -> bool:
        """Return whether the options ask for a partition, be it there or not."""
        topics, (topic, number) = self._options.topics, at
        if topics.assigned:
            return number in topics.assigned.get(topic, ())
        if topics.pattern:
            return not topic.startswith("$") and re.fullmatch(topics.pattern, topic) is not None
        return topic in topics.names

    def find(self, at: At) -> Bounds | None:
        """Return what one partition holds, whether it is read or not; `None` if there is no such partition for us.

        Raises:
            BabelbusError: the bus did not answer.
        """
        topic, number = at
        try:
            return self._reach.bounds(topic, (number,)).get(number)
        except UnknownTopicError:
            return None

    def batch(self) -> list[Span]:
        """Return what a batch reads.

        Raises:
            BabelbusError: an offset or a time does not exist, or the bus did not answer.
        """
        bounds = self.bounds()
        pattern = self._options.topics.pattern
        if pattern and not bounds:
            raise OptionError(f"option subscribePattern: no topic has a name that {pattern!r} fits (whole names)")
        start, end = self.settle(bounds, self._options.start), self.settle(bounds, self._options.end)
        for (topic, number), offset in start.items():
            there = bounds[topic, number]
            if offset > there.end:
                self.lose(topic, number, offset, there, 0, "it does not exist yet")
            elif offset > max(end[topic, number], there.first):
                raise OptionError(
                    f"option {self._options.start.option}: reading of topic {topic!r}, partition {number} would begin"
                    f" at offset {offset}, after its end at {end[topic, number]} (option {self._options.end.option})"
                )
        return self.spans(start, end, bounds)

    def settle(self, bounds: dict[At, Bounds], edge: Edge) -> dict[At, int]:
        """Return the offset of each partition that an option means.

        Raises:
            OptionError: the option does not name the partitions that there are.
            NoRecordError: there is no record at or after a time, and that is an error.
        """
        each = edge.offsets or edge.timestamps
        if each:
            named = {(topic, number) for topic, partitions in each.items() for number in partitions}
            for one, problem in (
                (named - set(bounds), "does not exist"),
                (set(bounds) - named, "is not named: name all"),
            ):
                if one:
                    topic, number = min(one)
                    raise OptionError(f"option {edge.option}: partition {number} of topic {topic!r} {problem}")
        return {at: self._settle_one(at, one, edge) for at, one in bounds.items()}

    def _settle_one(self, at: At, bounds: Bounds, edge: Edge) -> int:
        topic, number = at
        timestamp = edge.timestamps[topic][number] if edge.timestamps else edge.timestamp
        if timestamp is not None:
            found = self._reach.find_time(topic, number, timestamp)
            if found is not None:
                return min(found, bounds.end)  # what lies beyond is not durable yet
            if edge is self._options.start and not self._options.latest_if_no_time:
                raise NoRecordError(
                    f"option {edge.option}: topic {topic!r}, partition {number} has no record at or after"
                    f" {timestamp} ms; with startingOffsetsByTimestampStrategy=latest reading begins at its end"
                )
            return bounds.end
        offset = edge.offsets[topic][number] if edge.offsets else edge.offset
        assert offset is not None  # an edge is one of the four
        return {EARLIEST: bounds.first, LATEST: bounds.end}.get(offset, offset)

    def spans(self, start: dict[At, int], end: dict[At, int], bounds: dict[At, Bounds]) -> list[Span]:
        """Return what lies between two sets of offsets, as far as it is still there.

        Raises:
            DataLossError: some of it is not, and failOnDataLoss is true.
        """
        found = []
        for (topic, number), until in end.items():
            begin = start[topic, number]
            there = bounds.get((topic, number))
            if until <= begin:
                continue
            if there is None:
                self.lose(topic, number, begin, None, until - begin, "the topic or the partition was removed")
                continue
            if until > there.end:
                lost = until - max(begin, there.end)
                why = "the log ends before: the offset does not exist yet, or the topic was made again"
                self.lose(topic, number, until, there, lost, why)
            elif begin < there.first:
                lost = min(until, there.first) - begin
                self.lose(topic, number, begin, there, lost, "retention removed what was in front")
            first, last = max(begin, there.first), min(until, there.end)
            if last > first:
                found.append(Span(topic, number, first, last, int((last - first) * there.record_bytes) + 1))
        return found

    def lose(self, topic: str, partition: int, wanted: int, there: Bounds | None, lost: int, why: str) -> None:
        """Refuse to continue without records that are gone, or count the lost records.

        Raises:
            DataLossError: failOnDataLoss is true.
        """
        error = DataLossError(topic, partition, wanted, None if there is None else (there.first, there.end), why)
        if self._options.fail_on_data_loss:
            raise error
        self.lost_records += lost
        log.warning("%d offsets are lost, %d in all: %s", lost, self.lost_records, error)
