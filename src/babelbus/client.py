"""The public client: publish to the bus and read from it.

    from babelbus.client import BlockingClient, Identity

    with BlockingClient(identity=Identity.load("data/conf/admin_key")) as client:
        client.publish("plant", b"21.5")

`Client` is the same for asyncio. Every error is a `BabelbusError`; connection and server errors are `ClientError`s.
"""

from babelbus.clients.jebp import (
    BlockingClient,
    Client,
    ClientClosedError,
    ClientError,
    ConnectionLostError,
    Fetched,
    FetchedBatch,
    FetchedPartition,
    Flushed,
    NoRightsError,
    NotAuthorisedError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    Position,
    Published,
    RecordTooLargeError,
    RequestError,
    RequestTimeoutError,
    TopicExistsError,
    UnknownPartitionError,
    UnknownTopicError,
    UnsupportedByServerError,
    UntrustedServerError,
)
from babelbus.errors import BabelbusError, LocalProtocolError
from babelbus.protocols.jebp.identity import Identity, IdentityError
from babelbus.protocols.jebp.messages import PartitionPositions, TopicPositions
from babelbus.records.columns import Columns
from babelbus.records.format import CorruptRecordError, InvalidRecordError
from babelbus.records.record import Headers, Record

__all__ = [
    "BabelbusError",
    "BlockingClient",
    "Client",
    "ClientClosedError",
    "ClientError",
    "Columns",
    "ConnectionLostError",
    "CorruptRecordError",
    "Fetched",
    "FetchedBatch",
    "FetchedPartition",
    "Flushed",
    "Headers",
    "Identity",
    "IdentityError",
    "InvalidRecordError",
    "LocalProtocolError",
    "NoRightsError",
    "NotAuthorisedError",
    "OffsetOutOfRangeError",
    "OutcomeUnknownError",
    "PartitionPositions",
    "Position",
    "Published",
    "Record",
    "RecordTooLargeError",
    "RequestError",
    "RequestTimeoutError",
    "TopicExistsError",
    "TopicPositions",
    "UnknownPartitionError",
    "UnknownTopicError",
    "UnsupportedByServerError",
    "UntrustedServerError",
]
