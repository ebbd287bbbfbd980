"""Micro-batch streams: which offsets the next batch reads, and what to do when they are gone.

One object of this class lives in a process of its own on the driver as long as the query runs, and remembers. The
copies that Spark sends to the tasks only read.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from babelbus.clock import Clock, SystemClock
from babelbus.spark import plan
from babelbus.spark.available_offsets import Survey
from babelbus.spark.options import SourceOptions
from babelbus.spark.plan import IDS, LOST, NOTE, At, Bounds
from babelbus.spark.reader import plan_tasks, read_task
from babelbus.spark.record_source import Reach, open_reach

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

JsonOffsets = dict[str, Any]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("babelbus")`. An offset of Spark's is `{"topic": {"partition": offset}}`.

    Beside the topics it has their ids: so a query that is started again notices too that a topic was made again. And
    it has how many offsets were lost so far, so that progress shows it with failOnDataLoss=false.
    A partition that appears while the query runs joins the offsets with its first one before anything of it is read:
    so a batch that is run again after a crash begins where it began, whatever retention did meanwhile.
    """

    def __init__(
        self, options: SourceOptions, schema: StructType, *, reach: Reach | None = None, clock: Clock | None = None
    ) -> None:
        self._options = options
        self._schema = schema
        self._reach = reach
        self._clock = clock
        self._survey: Survey | None = None
        self._initial: JsonOffsets | None = None
        self._bounds: dict[At, Bounds] = {}
        self._seen: dict[At, Bounds] = {}
        """The last bounds seen of each partition of the offsets, also of topics that were removed or made again."""
        self._identities: dict[At, str] = {}
        self._target: dict[At, int] | None = None
        self._waiting_since: float | None = None
        self._told: dict[At, int] = {}

    # -- what Spark asks on the driver -------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a new query begins; Spark asks twice, and must get the same answer."""
        if self._initial is None:
            bounds = self._look(missing_ok=False)
            self._initial = to_json(self._surveyor().settle(bounds, self._options.start), bounds)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of a batch that the options ask for."""
        if self._options.records_per_trigger_max is not None:
            return ReadMaxRows(self._options.records_per_trigger_max)
        if self._options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger_max)
        if self._options.records_per_trigger_min is not None:
            return ReadMinRows(self._options.records_per_trigger_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Record where the topics end now: this run reads up to there and stops."""
        self._target = {at: one.end for at, one in self._look().items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where the next batch ends; `start` itself when there is nothing to do.

        Raises:
            DataLossError: records in front of it are gone, and failOnDataLoss is true.
            BabelbusError: the bus did not answer.
        """
        if self._initial is None and self._options.start.option and not self._bounds:
            log.warning("the checkpoint says where to go on; option %s has no effect", self._options.start.option)
        bounds = self._look()
        begin, begun_again, gone = self._check(from_json(start), start.get(IDS, {}), bounds)
        self._tell(begin)
        new = {at: self._first_of(at, bounds) for at in bounds if at not in begin and at not in begun_again}
        ends = {at: self._end_of(at, bounds) for at in begin}
        end = self._limited(begin, ends, bounds, limit)
        if begun_again or new:
            log.info("%d partitions are new, %d were made again", len(new), len(begun_again))
        # Noted with failOnDataLoss too, though `partitions` will raise: Spark keeps this end, and who then says `false`
        # goes on with the same batch.
        lost = start.get(LOST, 0) + gone
        lost += sum(max(min(end[at], bounds[at].first) - begin[at], 0) for at in begin)
        found = to_json(end | new | begun_again, bounds)
        return found | {LOST: lost} if lost else found

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return where the topics end: the lag is what lies between this and a batch's end."""
        return to_json({at: one.end for at, one in self._bounds.items()}, {}) if self._bounds else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks that read what lies between two offsets."""
        begin, until = from_json(start), from_json(end)
        ids = end.get(IDS, {})
        if any(at not in self._bounds or self._bounds[at].end < until[at] for at in until):
            self._look()
        known = {at: offset for at, offset in until.items() if at in begin}  # the others have nothing to read yet
        for at, offset in list(known.items()):
            there, wanted = self._bounds.get(at), offset - begin[at]
            if wanted <= 0:
                continue
            if there is None:
                self._lose_missing(at, begin[at], begin, wanted)
                del known[at]
            elif _is_another(there, ids.get(at[0], "")):
                self._surveyor().lose(*at, begin[at], there, wanted, _MADE_AGAIN)
                del known[at]
        return plan_tasks(self._options, self._surveyor().spans(begin, known, self._bounds))

    # -- what runs in the tasks --------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the records of one task."""
        return read_task(partition, self._schema)

    # -- how ---------------------------------------------------------------------------------------------------------

    def _surveyor(self) -> Survey:
        if self._survey is None:
            self._survey = Survey(self._options, self._reach or open_reach(self._options.place))
        return self._survey

    def _look(self, *, missing_ok: bool = True) -> dict[At, Bounds]:
        self._bounds = self._surveyor().bounds(missing_ok=missing_ok)
        for at, there in self._bounds.items():
            known = self._seen.setdefault(at, there)
            if known.identity == there.identity and known.end < there.end:
                self._seen[at] = there
        return self._bounds

    def _tell(self, begin: dict[At, int]) -> None:
        """Send the server the progress of the query: all in front of `begin` is done, the next batch begins there."""
        group = self._options.group
        if not group or begin == self._told:
            return
        from babelbus.spark.server import ServerReach

        reach = self._reach or open_reach(self._options.place)
        assert isinstance(reach, ServerReach)  # the option goes with url
        for topic in sorted({topic for topic, _ in begin}):
            reach.move_group(topic, group, {number: at for (name, number), at in begin.items() if name == topic})
        self._told = begin

    def _first_of(self, at: At, bounds: dict[At, Bounds]) -> int:
        log.info("topic %r, partition %d is new and read from offset %d on", *at, bounds[at].first)
        self._identities[at], self._seen[at] = bounds[at].identity, bounds[at]
        return bounds[at].first

    def _end_of(self, at: At, bounds: dict[At, Bounds]) -> int:
        return bounds[at].end if self._target is None else min(bounds[at].end, self._target.get(at, 0))

    def _check(
        self, start: dict[At, int], ids: dict[str, str], bounds: dict[At, Bounds]
    ) -> tuple[dict[At, int], dict[At, int], int]:
        """Return where the batch begins in each partition, the first offsets of those that were made again, and a loss.

        The loss is how many offsets went with topics that were removed, as far as this object has seen them there.

        Raises:
            DataLossError: a partition is not what it was, and failOnDataLoss is true.
        """
        begin: dict[At, int] = {}
        begun_again: dict[At, int] = {}
        lost = 0
        survey = self._surveyor()
        for at, offset in start.items():
            there = bounds.get(at)
            if there is None:
                lost += self._lose_missing(at, offset, start, self._unread(at, offset))
                continue
            known = self._identities.setdefault(at, there.identity)
            if there.end < offset or there.identity != known or _is_another(there, ids.get(at[0], "")):
                unread = self._unread(at, offset)
                survey.lose(*at, offset, there, unread, f"{_MADE_AGAIN}, or has lost its end")
                self._identities[at], self._seen[at] = there.identity, there
                begun_again[at] = there.first
                lost += unread
            else:
                begin[at] = offset
        return begin, begun_again, lost

    def _lose_missing(self, at: At, offset: int, start: dict[At, int], unread: int) -> int:
        """Refuse to continue without a partition that the checkpoint has, or return the number of lost offsets.

        Raises:
            DataLossError: failOnDataLoss is true.
        """
        survey = self._surveyor()
        if not survey.is_chosen(at):
            there = survey.find(at)
            if there is not None:
                survey.lose(*at, offset, there, 0, _not_chosen(start))
                return 0  # nothing is gone
        survey.lose(*at, offset, None, unread, "the topic or the partition was removed")
        return unread

    def _unread(self, at: At, offset: int) -> int:
        """Return how many offsets were there from `offset` on when this was last seen as what it was."""
        seen, there = self._seen.get(at), self._bounds.get(at)
        if seen is None:
            return 0
        if there is not None and seen.identity == there.identity and offset <= there.end:
            return 0  # only the topic that is there now was seen
        return max(seen.end - offset, 0)

    def _limited(
        self, start: dict[At, int], end: dict[At, int], bounds: dict[At, Bounds], limit: ReadLimit
    ) -> dict[At, int]:
        """Return how far the batch reads."""
        # What retention removed is no backlog; the next `partitions` tells of it.
        begin = {at: min(max(offset, bounds[at].first), max(end[at], offset)) for at, offset in start.items()}
        end = {at: max(offset, start[at]) for at, offset in end.items()}  # a target may lie behind
        if isinstance(limit, ReadAllAvailable):
            return end
        if self._target is None and self._must_wait(begin, end):
            return start
        if isinstance(limit, ReadMaxRows):
            return plan.limit(begin, end, limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            return plan.limit(begin, end, limit.max_bytes, {at: bounds[at].record_bytes for at in end})
        return end

    def _must_wait(self, begin: dict[At, int], end: dict[At, int]) -> bool:
        """Return whether too few records are there yet, and the first of them has not waited long enough."""
        least = self._options.records_per_trigger_min
        if least is None:
            return False
        backlog = sum(end[at] - begin[at] for at in end)
        if backlog == 0:
            self._waiting_since = None
            return True
        now = (self._clock or SystemClock()).monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if backlog < least and now - self._waiting_since < self._options.trigger_delay_seconds:
            return True
        self._waiting_since = None
        return False


NAMES_MAX = 5
"""Of topics in one message."""
_MADE_AGAIN = "the topic was removed and made again"


def _is_another(there: Bounds, known: str) -> bool:
    """Return whether a topic is not the one whose id was noted; those of before there were ids have none."""
    return bool(known and there.id) and there.id != known


def _not_chosen(start: dict[At, int]) -> str:
    """Return why a partition is not read that is there."""
    topics = sorted({repr(topic) for topic, _ in start})
    named = ", ".join(topics[:NAMES_MAX]) + (f" and {len(topics) - NAMES_MAX} more" if len(topics) > NAMES_MAX else "")
    return (
        f"it is not among the topics and partitions that are read now (the checkpoint is of {named}): use another"
        " checkpoint, or read the old ones too"
    )


def to_json(offsets: dict[At, int], bounds: dict[At, Bounds]) -> JsonOffsets:
    """Return offsets as Spark keeps them in its checkpoint, with the ids of their topics."""
    found: JsonOffsets = {}
    ids: dict[str, str] = {}
    for (topic, number), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(number)] = offset
        there = bounds.get((topic, number))
        if there is not None and there.id:
            ids[topic] = there.id
    return found | {IDS: ids} if ids else found


def from_json(offsets: JsonOffsets) -> dict[At, int]:
    """Read the offsets of what `to_json` gave."""
    return {
        (topic, int(number)): at
        for topic, partitions in offsets.items()
        if not topic.startswith(NOTE)
        for number, at in partitions.items()
    }
