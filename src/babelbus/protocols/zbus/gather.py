"""Appending what many connections publish in one turn of the event loop with one write for each MQ."""

import asyncio
from collections.abc import Callable, Sequence

from babelbus.core.record import Receipt
from babelbus.core.topic import Topic
from babelbus.errors import StorageError
from babelbus.protocols.contract import Answer
from babelbus.protocols.zbus.repeat import Repeat
from babelbus.protocols.zbus.stored import front_of
from babelbus.storage.format import encode_bodies

GATHER_MAX = 64
"""So many records at once are a batch by themselves."""


class _Gathered:
    """Records of one topic that one turn of the event loop brought, from many connections."""

    __slots__ = ("bodies", "front", "promises", "receipt", "size_bytes", "timestamp", "timestamps")

    def __init__(self, timestamp: int) -> None:
        self.timestamp = timestamp
        self.front = front_of(timestamp)
        self.bodies: list[bytes] = []
        self.timestamps: list[int] = []
        self.size_bytes = 0
        self.receipt = Receipt(-1, -1, 0)
        self.promises: list[tuple[Answer, Repeat, bytes]] = []
        """Who wants to hear of records that came one by one, and their ids."""

    def settle(self, made: Receipt) -> None:
        """Tell all who wait what became of it."""
        error = made.error
        self.receipt.resolve(error)
        for answer, repeat, request_id in self.promises:
            answer.fulfil(repeat.reply(request_id, error))


class Gatherer:
    """What waits for the end of the turn.

    `on_appended` is told of what was appended: the topic, how many messages, and the bytes of their bodies.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_appended: Callable[[Topic, int, int], None] = lambda *_: None
    ) -> None:
        self._loop = loop
        self._on_appended = on_appended
        self._waiting: dict[Topic, _Gathered] = {}

    def append(self, topic: Topic, bodies: Sequence[bytes], timestamp: int, size_bytes: int) -> Receipt:
        """Append records that a `Recorder` made to a topic of one partition; `size_bytes` is that of the payloads.

        Few of them wait for the end of this turn of the event loop, so that what many connections publish at once is
        one write; `commit` is for who cannot wait.
        """
        if len(bodies) >= GATHER_MAX:
            if topic in self._waiting:
                self.commit()
            return self._append(topic, bodies, [timestamp] * len(bodies), size_bytes)
        gathered = self._waiting.get(topic) or self._begin(topic)
        gathered.bodies += bodies
        gathered.timestamps += [timestamp] * len(bodies)
        gathered.size_bytes += size_bytes
        return gathered.receipt

    def append_one(self, topic: Topic, repeat: Repeat, request_id: bytes, body: bytes, answer: Answer) -> None:
        """Append one more record of a mould, and fulfil its answer when it is stored."""
        gathered = self._waiting.get(topic) or self._begin(topic)
        gathered.bodies.append(repeat.mould.body(gathered.front, request_id, body))
        gathered.timestamps.append(gathered.timestamp)
        gathered.size_bytes += len(body)
        gathered.promises.append((answer, repeat, request_id))

    def _begin(self, topic: Topic) -> _Gathered:
        if not self._waiting:
            self._loop.call_soon(self.commit)
        gathered = self._waiting[topic] = _Gathered(topic.stamp())
        return gathered

    def commit(self) -> None:
        """Append what was gathered."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for topic, gathered in waiting.items():
                made = self._append(topic, gathered.bodies, gathered.timestamps, gathered.size_bytes)
                made.when_done(gathered.settle)

    def _append(self, topic: Topic, bodies: Sequence[bytes], timestamps: list[int], size_bytes: int) -> Receipt:
        try:
            receipt = topic.publish_batch(encode_bodies(bodies, timestamps, 0))
        except StorageError as error:
            return Receipt.refused(error)
        self._on_appended(topic, len(bodies), size_bytes)
        return receipt
