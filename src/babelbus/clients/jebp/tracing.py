"""OpenTelemetry: spans of publishing and handling, and the trace context in headers (`pip install babelbus[otel]`).

The context travels in the headers of the W3C (`traceparent`, `tracestate`) or those of the configured propagator, so
that a consumer in any language continues the trace.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, Protocol

from babelbus.clients.jebp.errors import ClientError
from babelbus.records.record import Headers

SYSTEM: Final = "babelbus"


class TracingUnavailableError(ClientError):
    """Tracing was asked for, and OpenTelemetry is not installed."""

    def __init__(self) -> None:
        super().__init__("tracing needs OpenTelemetry, which is not installed: pip install 'babelbus[otel]'")


class Traced(Protocol):
    """A message or question whose headers may carry a trace."""

    @property
    def headers(self) -> Headers:
        """The headers."""

    @property
    def subject(self) -> str:
        """The subject."""


class Tracing:
    """The tracer of one client.

    Raises:
        TracingUnavailableError: OpenTelemetry is not installed.
    """

    def __init__(self) -> None:
        try:
            self._trace: Any = import_module("opentelemetry.trace")
            self._propagate: Any = import_module("opentelemetry.propagate")
        except ImportError:
            raise TracingUnavailableError from None
        self._tracer = self._trace.get_tracer(SYSTEM)

    @contextmanager
    def sending(self, operation: str, destination: str) -> Iterator[Headers]:
        """Yield the headers for a record, or a request, that is sent inside of a span of its own."""
        kind = self._trace.SpanKind.CLIENT if operation == "request" else self._trace.SpanKind.PRODUCER
        with self._tracer.start_as_current_span(
            f"{operation} {destination}", kind=kind, attributes=_attributes(operation, destination)
        ):
            carrier: dict[str, str] = {}
            self._propagate.inject(carrier)
            yield tuple((name.encode(), value.encode()) for name, value in carrier.items())

    @contextmanager
    def handling(self, destination: str, operation: str, message: Traced) -> Iterator[None]:
        """Run the handling of a message in a span, below the one that its headers name."""
        carrier = {
            name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for name, value in message.headers
            if value is not None
        }
        kind = self._trace.SpanKind.SERVER if operation == "respond" else self._trace.SpanKind.CONSUMER
        with self._tracer.start_as_current_span(
            f"{operation} {destination}",
            context=self._propagate.extract(carrier),
            kind=kind,
            attributes=_attributes(operation, destination) | {"messaging.babelbus.subject": message.subject},
        ):
            yield


def _attributes(operation: str, destination: str) -> dict[str, str]:
    return {
        "messaging.system": SYSTEM,
        "messaging.destination.name": destination,
        "messaging.operation.name": operation,
    }
