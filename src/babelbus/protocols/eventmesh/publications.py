"""The publications of a client over TCP (docs/specifications/eventmesh.md, 3.6).

Those of a chunk are appended together, once for each topic, and acknowledged with one write.
"""

from functools import partial

import msgspec

from babelbus.core.access import Identity
from babelbus.core.receipt import Promise
from babelbus.core.record import Event
from babelbus.core.work import Work
from babelbus.errors import BabelbusError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh import messages as m
from babelbus.protocols.eventmesh.callers import Caller
from babelbus.protocols.eventmesh.frames import FrameDecoder, encode_answer
from babelbus.protocols.eventmesh.hub import Hub
from babelbus.protocols.eventmesh.messages import Frame
from babelbus.protocols.eventmesh.records import InvalidMessageError, read_message

ACK_BYTES = 128
"""About the size of an acknowledgement that waits."""

Ack = tuple[str, bytes, str, str]
"""Command, `seq` as JSON, topic, and the error of a publication that has failed already."""

_encode = msgspec.json.Encoder().encode


class Publications:
    """The publications of one client that are gathered, until `settle`."""

    def __init__(self, hub: Hub, outbox: Outbox, decoder: FrameDecoder) -> None:
        """Begin with nothing; `decoder` has the framing of the client."""
        self._hub = hub
        self._outbox = outbox
        self._decoder = decoder
        self._events: dict[str, list[Event]] = {}
        self._acks: list[Ack] = []

    def add(self, name: str, frame: Frame, principal: Identity) -> None:
        """Collect the publication of a frame with the command `name`."""
        header = frame.header
        error, topic = "", ""
        try:
            event, _ = read_message(frame.body, str(header.seq or ""), header.properties, principal.source)
            topic = event.subject
            if len(event.payload or b"") > self._hub.settings.content_bytes_max:
                raise InvalidMessageError(f"event size exceeds the limit: {self._hub.settings.content_bytes_max}")
            self._events.setdefault(topic, []).append(event)
        except BabelbusError as fault:
            error = str(fault)
        self._acks.append((m.ANSWERS[name], _encode(header.seq), topic, error))

    def settle(self, caller: Caller | None) -> None:
        """Publish what is gathered for the client, and acknowledge it when it is stored."""
        if not self._acks:
            return
        assert caller is not None
        events, self._events = self._events, {}
        acks, self._acks = self._acks, []
        principal = caller.principal
        receipts = {topic: self._hub.publish_to(topic, batch, principal) for topic, batch in events.items()}
        weight = ACK_BYTES * len(acks)
        if any(isinstance(receipt, Work) and not receipt.done for receipt in receipts.values()):
            weight = self._outbox.bytes_max  # a topic is being made: what follows must not overtake
        encode = partial(self._encode_acks, acks, receipts, principal)
        self._outbox.answer_when([*receipts.values()], encode, weight)

    def _encode_acks(self, acks: list[Ack], receipts: dict[str, Promise], principal: Identity) -> bytes:
        surplus = self._decoder.answer_surplus
        answers = []
        for name, seq, topic, error in acks:
            if not error and receipts[topic].error is not None:
                error = principal.relative_text(str(receipts[topic].error))
            answers.append(encode_answer(surplus, name, seq, error))
        return b"".join(answers)
