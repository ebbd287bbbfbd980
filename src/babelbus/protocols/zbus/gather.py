"""Storing what many connections publish in one turn of the event loop with one write for each MQ."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from babelbus.core.receipt import Promise, Receipt
from babelbus.core.topic import Topic
from babelbus.errors import StorageError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus.repeat import Repeat
from babelbus.protocols.zbus.stored import mixed_bodies
from babelbus.records.format import encode_bodies

log = logging.getLogger(__name__)

GATHER_MAX = 64
"""So many records at once are a batch by themselves."""

Single = tuple[Repeat, bytes | None, bytes, Outbox]
"""A record that came by itself: what it has in common with the last one, its id (`None`: a new one), its body, and
where the answer goes."""


class _Gathered:
    """Records of one topic that one turn of the event loop brought, from many connections."""

    __slots__ = ("bodies", "receipt", "singles", "size_bytes", "timestamps", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.bodies: list[bytes] = []
        self.timestamps: list[int] = []
        self.size_bytes = 0
        self.receipt = Promise()
        self.singles: list[Single] = []

    def answer(self, made: Receipt, ids: Sequence[bytes]) -> None:
        """Answer the single ones, whose ids these are; each when it is known what becomes of it."""
        for (repeat, _, _, outbox), request_id in zip(self.singles, ids, strict=True):
            if made.done:
                outbox.say(repeat.reply(request_id, made.error))
            else:
                outbox.answer_when([made], partial(_reply, repeat, request_id, made), repeat.weight)


def _reply(repeat: Repeat, request_id: bytes, made: Receipt) -> bytes:
    return repeat.reply(request_id, made.error)


class Gatherer:
    """What waits for the end of the turn.

    `fill_ids` puts new ids where there are none. `on_appended` is told of what was appended: the topic, how many
    messages, and the bytes of their bodies.

    Attributes:
        turn: rises with each `commit`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        find_topic: Callable[[str], Topic | None],
        fill_ids: Callable[[Sequence[bytes | None]], list[bytes]],
        on_appended: Callable[[Topic, int, int], None],
    ) -> None:
        self.turn = 0
        self._loop = loop
        self._find_topic = find_topic
        self._fill_ids = fill_ids
        self._on_appended = on_appended
        self._waiting: dict[str, _Gathered] = {}

    def append(self, topic: Topic, bodies: Sequence[bytes], timestamp: int, size_bytes: int) -> Promise:
        """Append records that a `Recorder` made to a topic of one partition; `size_bytes` is that of the payloads.

        Few of them wait for the end of this turn of the event loop, so that what many connections publish at once is
        one write; `commit` is for who cannot wait.
        """
        if len(bodies) >= GATHER_MAX:
            if topic.name in self._waiting:
                self.commit()
            return self._append(topic, bodies, [timestamp] * len(bodies), size_bytes)
        gathered = self._waiting.get(topic.name)
        if gathered is not None and gathered.topic is not topic:  # it was removed and made again
            self.commit()
            gathered = None
        if gathered is None:
            gathered = self._begin(topic)
        gathered.bodies += bodies
        gathered.timestamps += [timestamp] * len(bodies)
        gathered.size_bytes += size_bytes
        return gathered.receipt

    def append_single(self, single: Single) -> bool:
        """Append one more record like the last one of its connection; `False` if its MQ is not what it was.

        It is the only one of its connection in this turn. The outbox is idle, and gets nothing else to say before the
        `commit` at the end of the turn.
        """
        mq = single[0].mq
        gathered = self._waiting.get(mq)
        if gathered is None:
            topic = self._find_topic(mq)
            if topic is None or len(topic.partitions) != 1:
                return False
            gathered = self._begin(topic)
        gathered.singles.append(single)
        return True

    def _begin(self, topic: Topic) -> _Gathered:
        if not self._waiting:
            self._loop.call_soon(self.commit)
        gathered = self._waiting[topic.name] = _Gathered(topic)
        return gathered

    def commit(self) -> None:
        """Append what was gathered."""
        if not self._waiting:
            return
        self.turn += 1
        waiting, self._waiting = self._waiting, {}
        for gathered in waiting.values():
            ids = self._fill_ids([one[1] for one in gathered.singles])
            made = self._store(gathered, ids)
            made.when_done(lambda made, gathered=gathered: gathered.receipt.resolve(made.error))  # type: ignore[misc]
            gathered.answer(made, ids)

    def _store(self, gathered: _Gathered, ids: Sequence[bytes]) -> Receipt:
        """Append the records, with those of the single ones, whose ids these are."""
        topic, timestamps, size_bytes = gathered.topic, gathered.timestamps, gathered.size_bytes
        bodies = gathered.bodies
        if ids:
            timestamp = topic.stamp()
            payloads = [one[2] for one in gathered.singles]
            bodies = bodies + mixed_bodies([one[0].mould for one in gathered.singles], ids, payloads, timestamp)
            timestamps = timestamps + [timestamp] * len(ids)
            size_bytes += sum(map(len, payloads))
        return self._append(topic, bodies, timestamps, size_bytes)

    def _append(self, topic: Topic, bodies: Sequence[bytes], timestamps: list[int], size_bytes: int) -> Receipt:
        try:
            receipt = topic.publish_batch(encode_bodies(bodies, timestamps, 0))
        except StorageError as error:
            return Receipt.refused(error)
        except Exception:  # one topic's bug must not cost the clients of others their answers
            log.exception("publishing to %s failed", topic.name)
            return Receipt.refused(StorageError("the server failed; its log says why"))
        try:
            self._on_appended(topic, len(bodies), size_bytes)
        except Exception:
            log.exception("counting what was published to %s failed", topic.name)
        return receipt
