"""Dead letters over the administration endpoint: what there is, replay to where they came from, purge."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from babelbus.core.access import Identity
from babelbus.core.broker import Broker
from babelbus.core.groups import OURS, DeadLetterTopicInfo, DeadLetterTopics, Replayed, letters_of
from babelbus.core.groups import Letter as StoredLetter
from babelbus.core.rooted import relative_record
from babelbus.errors import BabelbusError
from babelbus.records.record import Record
from babelbus.web.answers import answer, read_body, read_number
from babelbus.web.calls import Answer, Call, Route
from babelbus.web.lines import LetterLine, LetterOrigin, Letters
from babelbus.web.record_lines import line_of
from babelbus.web.shown_records import Limits, ShownRecord, show

encode = msgspec.json.Encoder().encode
COUNT = 100
COUNT_MAX = 1_000
"""Most letters of one answer."""
REASON_LENGTH_MAX = 1_000
"""A longer reason is shortened with its record."""


class ReplayBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At most `max` letters, or those at `places` (partition, offset). With `progress` the answer is lines."""

    max: int | None = None
    places: list[tuple[int, int]] = []
    progress: bool = False


class PurgeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`all`: also letters that were not replayed."""

    all: bool = False


class ShownLetter(msgspec.Struct, frozen=True):
    """A letter with its record shortened."""

    record: ShownRecord
    origin: LetterOrigin | None
    replayed: bool


class ShownLetters(msgspec.Struct, frozen=True):
    """As `Letters`, with the bounds of the partition."""

    letters: list[ShownLetter]
    next_offset: int | None
    first_offset: int
    end_offset: int


class DeadLetterRoutes:
    """The requests about dead letters."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = DeadLetterTopics(broker, broker.groups)

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("GET", "/api/dead-letters", self._list),
            ("GET", "/api/dead-letters/{name}", self._show),
            ("GET", "/api/dead-letters/{name}/{partition}", self._letters),
            ("POST", "/api/dead-letters/{name}/replay", self._replay),
            ("POST", "/api/dead-letters/{name}/purge", self._purge),
        )

    async def _list(self, call: Call) -> web.Response:
        principal = call.principal
        return answer({"dead_letters": [_shown(one, principal) for one in self._topics.all(principal)]})

    def _name(self, call: Call) -> str:
        """Return the topic of dead letters, or the group that sends there, which a request means."""
        name, root = call.path_values["name"], call.principal.root
        if root is None:
            return name
        topic = root.absolute(name)  # a name of a group could mean a group of others
        return topic if self._broker.has_topic(topic) else root.absolute(letters_of(name))

    async def _show(self, call: Call) -> web.Response:
        principal = call.principal
        return answer(_shown(self._topics.info(self._name(call), principal), principal))

    async def _letters(self, call: Call) -> web.Response:
        partition = call.path_values["partition"]
        if not partition.isascii() or not partition.isdigit() or len(partition) > 9:
            raise web.HTTPNotFound
        count = min(read_number(call, "max", 1) or COUNT, COUNT_MAX)
        offset = read_number(call, "offset") or 0
        name, principal, only_waiting = self._name(call), call.principal, call.query.get("waiting") == "1"
        letters = await self._topics.read(name, int(partition), offset, count, principal, only_waiting=only_waiting)
        more = letters[-1].record.offset + 1 if len(letters) == count else None
        if call.query.get("shortened") != "1":
            return answer(Letters([_line(letter, principal) for letter in letters], more))
        topic = self._broker.topic(self._topics.info(name, principal).topic)
        source = topic.partition(int(partition))
        shown = [_shortened(letter, topic.name, principal) for letter in letters]
        return answer(ShownLetters(shown, more, source.log.first_offset, source.high_watermark))

    async def _replay(self, call: Call) -> Answer:
        wanted = await read_body(call, ReplayBody)
        if wanted.max is not None and wanted.max < 1:
            raise web.HTTPBadRequest(text="max is at least 1")
        name, principal = self._name(call), call.principal
        if wanted.progress:
            return await self._replay_in_lines(call, wanted)
        done = await self._topics.replay(name, count_max=wanted.max, places=wanted.places, principal=principal)
        return answer(_outcome(done, principal))

    async def _replay_in_lines(self, call: Call, wanted: ReplayBody) -> Answer:
        """Answer with lines of progress while letters are replayed; the replay ends when its reader goes away."""
        name, principal = self._name(call), call.principal
        self._topics.info(name, principal)  # a mistake is answered as ever, before the lines begin
        lines = await call.begin_lines()

        async def tell(outcome: Replayed) -> None:
            progress = {"replayed": outcome.replayed, "failed": outcome.failed, "waiting": outcome.waiting}
            await lines.write(encode({"progress": progress}) + b"\n")

        try:
            done = await self._topics.replay(
                name, count_max=wanted.max, places=wanted.places, principal=principal, tell=tell
            )
            last: dict[str, object] = {"done": _outcome(done, principal)}
        except BabelbusError as error:
            last = {"error": principal.relative_text(str(error))}
        await lines.write(encode(last) + b"\n")
        return lines

    async def _purge(self, call: Call) -> web.Response:
        wanted = await read_body(call, PurgeBody)
        name, principal = self._name(call), call.principal
        return answer(_shown(await self._topics.purge(name, everything=wanted.all, principal=principal), principal))


def _shown(info: DeadLetterTopicInfo, principal: Identity) -> DeadLetterTopicInfo:
    """Return what a principal is told of a topic of dead letters."""
    relative = principal.relative
    senders = tuple(msgspec.structs.replace(one, topic=relative(one.topic)) for one in info.senders)
    return msgspec.structs.replace(info, topic=relative(info.topic), senders=senders)


def _outcome(done: Replayed, principal: Identity) -> Replayed:
    """Return the outcome of a replay as a principal is told."""
    failures = [msgspec.structs.replace(one, reason=principal.relative_text(one.reason)) for one in done.failures]
    return msgspec.structs.replace(done, topic=principal.relative(done.topic), failures=failures)


def _shortened(letter: StoredLetter, topic: str, principal: Identity) -> ShownLetter:
    record, origin = _split(letter, principal)
    if origin is not None and len(origin.reason) > REASON_LENGTH_MAX:
        origin = msgspec.structs.replace(origin, reason=f"{origin.reason[:REASON_LENGTH_MAX]}...")
    source = topic if letter.letter is None else letter.letter.topic  # its subject is one of the topic of origin
    return ShownLetter(show(record, letter.partition, source, principal, Limits()), origin, letter.replayed)


def _line(letter: StoredLetter, principal: Identity) -> LetterLine:
    record, origin = _split(letter, principal)
    if principal.root is not None:
        record = relative_record(record, principal.root)
    return LetterLine(line_of(record, letter.partition), origin, letter.replayed)


def _split(letter: StoredLetter, principal: Identity) -> tuple[Record, LetterOrigin | None]:
    """Return the record of a letter without the headers of the dead letter, and what those say."""
    record, came = letter.record, letter.letter
    if came is not None:
        # Somebody else may have written the header: what is no UTF-8 must not spoil the answer.
        came = msgspec.structs.replace(
            came, topic=principal.relative(came.topic).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        )
        kept = tuple(pair for pair in record.headers if pair[0] not in OURS)
        record = Record(record.payload, record.key, kept, record.timestamp, record.attributes, record.offset)
    return record, None if came is None else LetterOrigin(**msgspec.structs.asdict(came))
