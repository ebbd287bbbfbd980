"""The client of jebp: publish, fetch, follow and transactions over one encrypted connection."""

from babelbus.clients.jebp.admin import BlockingAdmin, admin_of
from babelbus.clients.jebp.batching import Flushed, Position
from babelbus.clients.jebp.blocking import (
    BlockingClient,
    BlockingConsumer,
    BlockingPartWriter,
    BlockingResponder,
    BlockingSubscription,
)
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
    HistoryGoneError,
    LockedError,
    LockLostError,
    NoRespondersError,
    NoRightsError,
    NoSuchKeyError,
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
    VersionConflictError,
)
from babelbus.clients.jebp.live import Event, Subscription
from babelbus.clients.jebp.locks import Lock
from babelbus.clients.jebp.manage import DeadLetterInfo, GroupCursor, GroupInfo, Replayed, TopicInfo, TopicPartition
from babelbus.clients.jebp.messages import Message
from babelbus.clients.jebp.producer import Published
from babelbus.clients.jebp.reader import Fetched, FetchedBatch, FetchedPartition
from babelbus.clients.jebp.respond import Question, Responder
from babelbus.clients.jebp.state import Past, State
from babelbus.clients.jebp.state_blocking import BlockingLock, BlockingPast, BlockingState
from babelbus.clients.jebp.tracing import TracingUnavailableError
from babelbus.clients.jebp.values import Change, Entry, Revision, Revisions
from babelbus.errors import BabelbusError, LocalProtocolError
from babelbus.protocols.jebp.call_messages import Emitted, Reply
from babelbus.protocols.jebp.identity import Identity, IdentityError
from babelbus.protocols.jebp.messages import PartitionPositions, TopicPositions
from babelbus.records.plain import CorruptRecordError, InvalidRecordError
from babelbus.records.record import Headers, Record

__all__ = [
    "BabelbusError",
    "BadArgumentError",
    "BlockingAdmin",
    "BlockingClient",
    "BlockingConsumer",
    "BlockingLock",
    "BlockingPartWriter",
    "BlockingPast",
    "BlockingResponder",
    "BlockingState",
    "BlockingSubscription",
    "Change",
    "Client",
    "ClientClosedError",
    "ClientError",
    "ConflictError",
    "ConnectionLostError",
    "Consumer",
    "CorruptRecordError",
    "DeadLetterInfo",
    "Emitted",
    "Entry",
    "Event",
    "ExistsError",
    "Fetched",
    "FetchedBatch",
    "FetchedPartition",
    "Flushed",
    "GoneError",
    "GroupCursor",
    "GroupInfo",
    "Headers",
    "HistoryGoneError",
    "Identity",
    "IdentityError",
    "InvalidRecordError",
    "LocalProtocolError",
    "Lock",
    "LockLostError",
    "LockedError",
    "Message",
    "NoRespondersError",
    "NoRightsError",
    "NoSuchKeyError",
    "NotAuthorisedError",
    "OffsetOutOfRangeError",
    "OutcomeUnknownError",
    "PartitionPositions",
    "Past",
    "Position",
    "Published",
    "Question",
    "QuotaError",
    "Record",
    "RecordTooLargeError",
    "Replayed",
    "Reply",
    "RequestError",
    "RequestFailedError",
    "RequestTimeoutError",
    "Responder",
    "Revision",
    "Revisions",
    "ServerDiskError",
    "State",
    "Subscription",
    "TopicExistsError",
    "TopicInfo",
    "TopicPartition",
    "TopicPositions",
    "TracingUnavailableError",
    "UnknownGroupError",
    "UnknownPartitionError",
    "UnknownTopicError",
    "UnsupportedByServerError",
    "UntrustedServerError",
    "VersionConflictError",
    "admin_of",
]
