"""The client of jebp: publish, fetch, follow and transactions over one encrypted connection."""

from babelbus.clients.jebp.batching import Flushed, Position
from babelbus.clients.jebp.blocking import BlockingClient, BlockingPartWriter
from babelbus.clients.jebp.client import Client
from babelbus.clients.jebp.consumer import Consumer
from babelbus.clients.jebp.errors import (
    BadArgumentError,
    ClientClosedError,
    ClientError,
    ConflictError,
    ConnectionLostError,
    ExistsError,
    GoneError,
    LockedError,
    NoRespondersError,
    NoRightsError,
    NotAuthorisedError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    QuotaError,
    RecordTooLargeError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    ServerDiskError,
    TopicExistsError,
    UnknownGroupError,
    UnknownPartitionError,
    UnknownTopicError,
    UnsupportedByServerError,
    UntrustedServerError,
)
from babelbus.clients.jebp.messages import Message
from babelbus.clients.jebp.producer import Published
from babelbus.clients.jebp.reader import Fetched, FetchedBatch, FetchedPartition
from babelbus.errors import BabelbusError, LocalProtocolError
from babelbus.protocols.jebp.identity import Identity, IdentityError
from babelbus.protocols.jebp.messages import PartitionPositions, TopicPositions
from babelbus.records.plain import CorruptRecordError, InvalidRecordError
from babelbus.records.record import Headers, Record

__all__ = [
    "BabelbusError",
    "BadArgumentError",
    "BlockingClient",
    "BlockingPartWriter",
    "Client",
    "ClientClosedError",
    "ClientError",
    "ConflictError",
    "ConnectionLostError",
    "Consumer",
    "CorruptRecordError",
    "ExistsError",
    "Fetched",
    "FetchedBatch",
    "FetchedPartition",
    "Flushed",
    "GoneError",
    "Headers",
    "Identity",
    "IdentityError",
    "InvalidRecordError",
    "LocalProtocolError",
    "LockedError",
    "Message",
    "NoRespondersError",
    "NoRightsError",
    "NotAuthorisedError",
    "OffsetOutOfRangeError",
    "OutcomeUnknownError",
    "PartitionPositions",
    "Position",
    "Published",
    "QuotaError",
    "Record",
    "RecordTooLargeError",
    "RequestError",
    "RequestFailedError",
    "RequestTimeoutError",
    "ServerDiskError",
    "TopicExistsError",
    "TopicPositions",
    "UnknownGroupError",
    "UnknownPartitionError",
    "UnknownTopicError",
    "UnsupportedByServerError",
    "UntrustedServerError",
]
