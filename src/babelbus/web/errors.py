"""What the administration endpoint refuses by itself."""

from babelbus.errors import BabelbusError


class InvalidEventError(BabelbusError):
    """An event cannot be published like this; the message says why."""


class UnknownConsumerError(BabelbusError):
    """The consumer's answer is not open any more: what it held has gone to others."""


class TooManyPipelinesError(BabelbusError):
    """So many pipelines, or sinks of one, are not shown: each is a series for Prometheus."""
