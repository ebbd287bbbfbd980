"""Errors of engine `jetstream`."""

from babelbus.errors import StorageError
from babelbus.records.format import InvalidRecordError
from babelbus.storage.errors import AlteredError, DiskError


class NatsAwayError(DiskError):
    """No NATS server answers: what was under way may be stored or not; try again when NATS is back."""


class NoLeaderError(NatsAwayError):
    """The leader of a stream does not answer, or JetStream elects one: a matter of seconds."""


class NatsRefusedError(StorageError):
    """NATS cannot be used as it is: credentials, version or JetStream itself. Somebody must change that first."""

    retriable = False


class StreamAlteredError(AlteredError):
    """A stream is not as this server made it: somebody deleted or changed it, or it belongs to another one."""


class RecordTooLargeError(InvalidRecordError):
    """A record is larger than a message that NATS takes (`max_payload` of its configuration)."""
