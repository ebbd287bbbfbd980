"""Lone publications of many connections in one turn of the event loop: encoded together, with their ids."""

from collections.abc import Callable, Sequence
from functools import partial

from babelbus.core.publish import Bodies
from babelbus.core.receipt import Receipt
from babelbus.core.topic import Topic
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus.repeat import Repeat
from babelbus.protocols.zbus.stored import mixed_bodies

Single = tuple[Repeat, bytes | None, bytes, Outbox]
"""A publication: what it has in common with the last one of its connection, its id (`None`: a new one), its body, and
where the answer goes."""


class Singles:
    """The lone publications to one MQ until the turn ends; the core encodes them with `make` (`publish.LateBodies`).

    A connection has one of them in a turn. Its outbox is idle, and gets nothing else to say before `appended`.
    """

    __slots__ = ("_fill_ids", "_ids", "_on_appended", "_singles", "open", "topic")

    def __init__(
        self,
        topic: Topic,
        fill_ids: Callable[[Sequence[bytes | None]], list[bytes]],
        on_appended: Callable[[Topic], None],
    ) -> None:
        self.topic = topic
        self.open = True
        """Whether more can be added."""
        self._fill_ids = fill_ids
        self._on_appended = on_appended
        self._singles: list[Single] = []
        self._ids: list[bytes] = []

    def __len__(self) -> int:
        return len(self._singles)

    def add(self, single: Single) -> None:
        """Add a publication."""
        self._singles.append(single)

    def make(self, timestamp: int) -> Bodies:
        """Return the bodies of the records."""
        self.open = False
        singles = self._singles
        self._ids = self._fill_ids([one[1] for one in singles])
        payloads = [one[2] for one in singles]
        bodies = mixed_bodies([one[0].mould for one in singles], self._ids, payloads, timestamp)
        return Bodies(bodies, [timestamp] * len(bodies), sum(map(len, payloads)))

    def appended(self, receipt: Receipt) -> None:
        """Answer each publication when its outcome is known."""
        self.open = False
        for (repeat, _, _, outbox), request_id in zip(self._singles, self._ids, strict=True):
            if receipt.done:
                outbox.say(repeat.reply(request_id, receipt.error))
            else:
                outbox.answer_when((receipt,), partial(_reply, repeat, request_id, receipt), repeat.weight)
        if receipt.error is None:
            self._on_appended(self.topic)


def _reply(repeat: Repeat, request_id: bytes, receipt: Receipt) -> bytes:
    return repeat.reply(request_id, receipt.error)
