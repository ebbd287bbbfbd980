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

__all__ = [
    "BlockingClient",
    "BlockingPartWriter",
    "Client",
    "ClientClosedError",
    "ClientError",
    "ConnectionLostError",
    "Fetched",
    "FetchedBatch",
    "FetchedPartition",
    "Flushed",
    "NoRightsError",
    "NotAuthorisedError",
    "OffsetOutOfRangeError",
    "OutcomeUnknownError",
    "Position",
    "Published",
    "RecordTooLargeError",
    "RequestError",
    "RequestTimeoutError",
    "TopicExistsError",
    "UnknownPartitionError",
    "UnknownTopicError",
    "UnsupportedByServerError",
    "UntrustedServerError",
]
