"""Errors of the administration endpoint's own checks."""

from babelbus.errors import BabelbusError


class InvalidEventError(BabelbusError):
    """The event cannot be published; the message says why."""


class UnknownConsumerError(BabelbusError):
    """The consumer's answer is not open any more: its records were delivered to other members."""


class UnknownResponderError(BabelbusError):
    """The responder's answer is not open any more: its questions went to other responders."""


class TooManyPipelinesError(BabelbusError):
    """Too many pipelines, or too many sinks of a pipeline: each sink is a series for Prometheus."""


class UnknownPrincipalError(BabelbusError):
    """The table has no principal of this name that can be changed."""


class UnknownConnectionError(BabelbusError):
    """There is no such connection: it has closed already."""


class SessionsClosedError(BabelbusError):
    """The client cannot log in at the console; the message says why."""


class ImportedPrincipalError(BabelbusError):
    """The principal comes from a file, and is changed there."""


class ClientExistsError(BabelbusError):
    """Another client has this name or this certificate."""


class UnknownClientError(BabelbusError):
    """The list of clients has no such fingerprint."""


class NoRecordError(BabelbusError):
    """There is no record at this place; the message says why."""


class InvalidCopyError(BabelbusError):
    """The records cannot be copied so; the message says why."""


class MoveRefusedError(BabelbusError):
    """The data cannot be given to that member now; the message says why."""


class NoClusterError(BabelbusError):
    """The server is in no cluster."""

    def __init__(self) -> None:
        super().__init__("this server is in no cluster: cluster.enabled is false")
