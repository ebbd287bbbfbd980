"""What happens on the bus, as an administrator hears it and takes part."""

from collections.abc import Callable, Sequence

import msgspec

from babelbus.core.access import Identity
from babelbus.core.broker import Broker
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.core.state import size_fault, subscription_pattern
from babelbus.core.topic import RESERVED_PREFIX
from babelbus.records.envelope import SOURCE_HEADER, SUBJECT_HEADER
from babelbus.server.administration_state import SOURCE, check_state_pattern
from babelbus.web.contract import InvalidEventError, Sent, Stop

ADMIN = Identity(SOURCE, SOURCE, None)


class LiveAdministrator:
    """Implements `web.contract.LiveAccess`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def listen(self, pattern: str, receiver: Callable[[Sequence[Event]], None]) -> Stop:
        """Let `receiver` have the events of all protocols and return what ends that; or raise `InvalidPatternError`."""
        check_state_pattern(pattern, self._broker.state.key_bytes_max)
        subscription = self._broker.subscribe(subscription_pattern(pattern), receiver)
        return lambda: self._broker.unsubscribe(subscription)

    async def send(self, event: Event) -> Sent:
        """Publish an event; return when it is as durable as its topic says. Or raise `InvalidEventError`."""
        subject = event.subject
        if not subject or subject.startswith(RESERVED_PREFIX):
            raise InvalidEventError(f"subject {subject!r}: it is empty or the server's own ({RESERVED_PREFIX}...)")
        fault = size_fault(subject, self._broker.state.key_bytes_max)
        if fault is not None:
            raise InvalidEventError(f"the subject {subject[:80]!r}... {fault}")
        if any(name == SUBJECT_HEADER for name, _ in event.headers):
            raise InvalidEventError("the header ce_subject is the server's: it holds the subject")
        event = msgspec.structs.replace(event, headers=(*event.headers, (SOURCE_HEADER, SOURCE.encode())))
        topic = self._broker.topic_of(subject)
        receivers = len(self._broker.router.find(subject))
        receipt = await self._broker.publish(Publication(ADMIN, SOURCE, [event])).wait()
        if topic is None:
            return Sent(None, None, None, receivers)
        return Sent(topic, receipt.partition, receipt.base_offset, receivers)
