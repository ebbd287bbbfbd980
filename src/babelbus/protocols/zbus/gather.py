"""Appending what many connections publish in one turn of the event loop with one write for each MQ."""

import asyncio
from collections.abc import Sequence

from babelbus.core.record import Receipt
from babelbus.core.topic import Topic
from babelbus.errors import StorageError
from babelbus.protocols.zbus.stored import encode_batch

GATHER_MAX = 64
"""So many records at once are a batch by themselves."""


class _Gathered:
    """Records of one topic that one turn of the event loop brought, from many connections."""

    __slots__ = ("bodies", "receipt", "timestamps")

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.timestamps: list[int] = []
        self.receipt = Receipt(-1, -1, 0)


class Gatherer:
    """What waits for the end of the turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Topic, _Gathered] = {}

    def append(self, topic: Topic, bodies: Sequence[bytes], timestamp: int) -> Receipt:
        """Append records that a `Recorder` made to a topic of one partition.

        Few of them wait for the end of this turn of the event loop, so that what many connections publish at once is
        one write; `commit` is for who cannot wait.
        """
        if len(bodies) >= GATHER_MAX:
            if topic in self._waiting:
                self.commit()
            return _append(topic, bodies, [timestamp] * len(bodies))
        gathered = self._waiting.get(topic)
        if gathered is None:
            if not self._waiting:
                self._loop.call_soon(self.commit)
            gathered = self._waiting[topic] = _Gathered()
        gathered.bodies += bodies
        gathered.timestamps += [timestamp] * len(bodies)
        return gathered.receipt

    def commit(self) -> None:
        """Append what was gathered."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for topic, gathered in waiting.items():
                made = _append(topic, gathered.bodies, gathered.timestamps)
                made.when_done(lambda made, receipt=gathered.receipt: receipt.resolve(made.error))  # type: ignore[misc]


def _append(topic: Topic, bodies: Sequence[bytes], timestamps: list[int]) -> Receipt:
    try:
        return topic.publish_batch(encode_batch(bodies, timestamps))
    except StorageError as error:
        return Receipt.refused(error)
