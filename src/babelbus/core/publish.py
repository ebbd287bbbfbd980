"""Publications of `Broker.publish`, and the one place that gathers what a turn of the event loop brings.

The path of a publication: the right to publish, the topic, the batch, its receipt, the live subscriptions. Everybody
takes it: clients of all protocols, the state's log, dead letters, commits of staged records and the admin endpoint.
"""

from collections.abc import Callable, Sequence

import msgspec

from babelbus.core.access import Identity
from babelbus.core.receipt import Receipt
from babelbus.core.record import Event
from babelbus.records.record import Headers, RecordBatch

SERVER_CHOOSES = -1
NO_PRODUCER = -1
GATHER_RECORDS_MAX = 64
"""So many records at once are a batch by themselves."""


class Payloads(msgspec.Struct, frozen=True, gc=False):
    """Records that are a payload and a time alone; the time 0 is the server's."""

    payloads: Sequence[bytes]
    timestamps: list[int]

    def __len__(self) -> int:
        return len(self.payloads)


class Bodies(msgspec.Struct, frozen=True, gc=False):
    """Records by what their CRCs cover, with their times; `size_bytes` is that of the payloads, which metrics count."""

    bodies: list[bytes]
    timestamps: list[int]
    size_bytes: int

    def __len__(self) -> int:
        return len(self.bodies)


Content = Payloads | Bodies | RecordBatch | list[Event]


class Publication(msgspec.Struct, frozen=True, gc=False):
    """The records or events of one publish call, and the client that publishes them.

    Without a `topic` the subject of each event decides. A `RecordBatch` was checked by `records.parse_records`, or the
    server made it; with a `producer_id` a batch that was stored before is not stored again and gets its first place,
    unless `fresh` says that it was not. `protocol` is a label of metrics. Live subscribers get the headers `source` in
    the place of headers of the same names; what is stored stays as it came.
    """

    principal: Identity
    protocol: str
    content: Content
    topic: str | None = None
    partition: int = SERVER_CHOOSES
    producer_id: int = NO_PRODUCER
    first_sequence: int = 0
    fresh: bool = False
    source: Headers = ()


Publish = Callable[[Publication], Receipt]
"""`Broker.publish`, as parts of the core are given it."""


class Gathered:
    """Publications of few records each, which become one batch with one receipt at the end of a turn.

    All of them are `Payloads`, or all are bodies, and all came through one protocol.
    """

    __slots__ = ("_plain", "_protocol", "publications", "receipt")

    def __init__(self, publication: Publication) -> None:
        self._plain = type(publication.content) is Payloads
        self._protocol = publication.protocol
        self.publications = [publication]
        self.receipt = Receipt()

    def takes(self, publication: Publication) -> bool:
        """Return whether a publication can be part of the batch."""
        return self._plain is (type(publication.content) is Payloads) and self._protocol == publication.protocol


def join_payloads(publications: Sequence[Publication]) -> tuple[Sequence[bytes], list[int]]:
    """Return the payloads and times of all publications."""
    payloads: list[bytes] = []
    timestamps: list[int] = []
    for publication in publications:
        content = publication.content
        assert type(content) is Payloads
        if len(publications) == 1:
            return content.payloads, content.timestamps
        payloads += content.payloads
        timestamps += content.timestamps
    return payloads, timestamps


def join_bodies(publications: Sequence[Publication]) -> Bodies:
    """Return the bodies of all publications."""
    if len(publications) == 1:
        return publications[0].content  # type: ignore[return-value]  # all are bodies
    bodies: list[bytes] = []
    timestamps: list[int] = []
    size_bytes = 0
    for publication in publications:
        content = publication.content
        assert type(content) is Bodies
        bodies += content.bodies
        timestamps += content.timestamps
        size_bytes += content.size_bytes
    return Bodies(bodies, timestamps, size_bytes)
