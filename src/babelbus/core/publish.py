"""Publications of `Broker.publish`, and the one place that gathers what a turn of the event loop brings.

The path of a publication: the right to publish, the topic, the batch, its receipt, the live subscriptions. Everybody
takes it: clients of all protocols, the state's log, dead letters, commits of staged records and the admin endpoint.
"""

from collections.abc import Callable, Sequence

import msgspec

from babelbus.core.access import Identity
from babelbus.core.receipt import Receipt
from babelbus.core.record import Event
from babelbus.records.record import Headers, Positions, RecordBatch

SERVER_CHOOSES = -1
NO_PRODUCER = -1
GATHER_RECORDS_MAX = 64
"""So many records at once are a batch of their own."""
GATHER_BYTES_MAX = 65_536
"""A batch in the stored form that is larger is not copied to be joined with others."""


class Payloads(msgspec.Struct, frozen=True, gc=False):
    """Records that are a payload and a time alone; the time 0 is the server's."""

    payloads: Sequence[bytes]
    timestamps: list[int]

    @property
    def size_bytes(self) -> int:
        """Bytes of the payloads, which metrics count."""
        return sum(map(len, self.payloads))

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
    unless `fresh` says that it was not. `at_once` says that the caller reads the receipt when `publish` returns: what
    prevents the append is there then. `protocol` is a label of metrics. Live subscribers get the headers `source` in
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
    at_once: bool = False
    source: Headers = ()


Publish = Callable[[Publication], Receipt]
"""`Broker.publish`, as parts of the core are given it."""


class Gathered:
    """Publications of few records each to one partition, which become one batch at the end of a turn.

    The receipt of a lone publication is the receipt of the batch.
    """

    __slots__ = ("_receipts", "bodies", "publications", "timestamps")

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.timestamps: list[int] = []
        self.publications: list[tuple[int, Publication]] = []
        """Each with the number of its first record."""
        self._receipts: list[Receipt] = []

    def add(self, publication: Publication, bodies: Sequence[bytes], timestamps: Positions) -> Receipt:
        """Add the records of a publication."""
        receipt = Receipt(count=len(bodies))
        self._receipts.append(receipt)
        self.publications.append((len(self.bodies), publication))
        self.bodies += bodies
        if not isinstance(timestamps, list):  # asked first: whether it is a sequence costs more than the rest
            timestamps = timestamps if isinstance(timestamps, Sequence) else timestamps.tolist()
        self.timestamps += timestamps
        return receipt

    @property
    def lone(self) -> Receipt | None:
        """The receipt of the only publication, `None` if there are more."""
        return self._receipts[0] if len(self._receipts) == 1 else None

    def settle(self, stored: Receipt) -> None:
        """Set the outcome of the batch in the receipts of its publications."""
        if stored is self._receipts[0]:
            return
        if stored.base_offset >= 0:
            for (index, _), receipt in zip(self.publications, self._receipts, strict=True):
                receipt.partition, receipt.base_offset = stored.partition, stored.base_offset + index

        def resolve(done: Receipt) -> None:
            for receipt in self._receipts:
                receipt.resolve(done.error)

        stored.when_done(resolve)
