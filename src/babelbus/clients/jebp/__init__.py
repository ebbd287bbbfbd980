"""The client of jebp: publish, fetch, follow and transactions over one encrypted connection."""

from babelbus.clients.jebp.batching import Flushed
from babelbus.clients.jebp.blocking import BlockingClient, BlockingPartWriter
from babelbus.clients.jebp.client import Client, Position
from babelbus.clients.jebp.errors import (
    ClientClosedError,
    ClientError,
    ConnectionLostError,
    NoRightsError,
    NotAuthorisedError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    RecordTooLargeError,
    RequestError,
    RequestTimeoutError,
    TopicExistsError,
    UnknownPartitionError,
    UnknownTopicError,
    UnsupportedByServerError,
    UntrustedServerError,
)
from babelbus.clients.jebp.producer import Published
from babelbus.clients.jebp.reader import Fetched, FetchedBatch, FetchedPartition
from babelbus.errors import BabelbusError, LocalProtocolError
from babelbus.protocols.jebp.identity import Identity, IdentityError
from babelbus.protocols.jebp.messages import PartitionPositions, TopicPositions
from babelbus.records.plain import CorruptRecordError, InvalidRecordError
from babelbus.records.record import Headers, Record

__all__ = [
    "BabelbusError",
    "BlockingClient",
    "BlockingPartWriter",
    "Client",
    "ClientClosedError",
    "ClientError",
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
