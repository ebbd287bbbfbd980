"""The requests of a client over TCP, and the questions that it answers (docs/specifications/eventmesh.md, 3.8)."""

import logging
from functools import partial

from babelbus.core.access import Identity
from babelbus.core.request import Question, Reply, Request, reads_too_slowly
from babelbus.errors import BabelbusError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh import messages as m
from babelbus.protocols.eventmesh.frames import FRAME_BYTES_MAX, OLD, TOO_LARGE, FrameDecoder, encode_message
from babelbus.protocols.eventmesh.hub import CORRELATION, PROTOCOL, Hub, correlation, without_correlation
from babelbus.protocols.eventmesh.messages import Frame
from babelbus.protocols.eventmesh.records import (
    InvalidMessageError,
    convert_reply,
    encode_body,
    flavour_of,
    read_message,
    read_ttl,
)
from babelbus.records.record import Headers

log = logging.getLogger(__name__)

TTL_MS = 3000
"""How long a request waits for its reply unless the request says so (3.8)."""


class Requests:
    """The requests of one client that wait for a reply, and the questions that wait for a reply of the client.

    A failure gets silence: Java takes each answer for the reply (3.8).
    """

    def __init__(self, hub: Hub, outbox: Outbox, decoder: FrameDecoder, peer: str) -> None:
        """Begin with nothing; `decoder` has the framing of the client."""
        self._hub = hub
        self._outbox = outbox
        self._decoder = decoder
        self._peer = peer
        self._waiting: dict[Request[Reply], None] = {}
        """Requests of the client that wait for their reply."""
        self._questions: dict[str, None] = {}
        """Ids of questions that were pushed and neither answered nor acknowledged: the `seq` of their pushes."""
        self._unanswered: dict[str, None] = {}
        """Ids of questions that the client has acknowledged without a reply, which may still come."""

    @property
    def is_idle(self) -> bool:
        """Whether the client waits for no reply, and no reply of the client is waited for."""
        return not (self._waiting or self._questions)

    # -- requests of the client --------------------------------------------------------------------------------------

    def ask(self, seq: bytes, frame: Frame, principal: Identity) -> None:
        """Send a request to a responder; `seq` is JSON."""
        properties = frame.header.properties
        try:
            event, named = read_message(frame.body, str(frame.header.seq or ""), properties, principal.source)
        except InvalidMessageError as error:
            log.info("%s %s: a request cannot be read: %s", PROTOCOL, self._peer, error)
            return
        request = self._hub.ask(event, read_ttl(named.get("ttl"), TTL_MS), principal)
        self._waiting[request] = None
        request.when_done(partial(self._replied, seq, event.subject, flavour_of(properties)))

    def _replied(self, seq: bytes, topic: str, flavour: m.Flavour, request: Request[Reply]) -> None:
        self._waiting.pop(request, None)
        reply = request.reply
        if reply is None:
            log.debug("%s %s: no reply from %r: %s", PROTOCOL, self._peer, topic, request.error)
            return
        headers = convert_reply(flavour, reply.payload, reply.headers)
        answer = self.encode(m.RESPONSE_TO_CLIENT, seq, topic, reply.payload, headers)
        if len(answer) > FRAME_BYTES_MAX:
            log.info("%s %s: a reply from %r is not sent: %s", PROTOCOL, self._peer, topic, TOO_LARGE)
            return
        self._send(answer)

    def end(self) -> None:
        """End the requests that wait for their reply, without an answer."""
        self._hub.abandon(self._waiting)

    # -- questions to the client -------------------------------------------------------------------------------------

    def push(self, topic: str, question: Question, principal: Identity) -> BabelbusError | None:
        """Send a question to the client, unless it reads too slowly."""
        if self._outbox.full:
            self._hub.metrics.live_dropped_total.labels(PROTOCOL, "slow").inc()
            return reads_too_slowly(question)
        name = self._hub.remember(question, principal, self._remove)
        self._questions[name] = None
        seq, more = b'"%b"' % name.encode(), correlation(name)
        push = self.encode(m.PUSH_REQUEST, seq, topic, question.payload, question.headers, more)
        if len(push) > FRAME_BYTES_MAX:
            self._hub.forget([name], f"cannot read it: {TOO_LARGE}")
        else:
            self._send(push)
        return None

    def _remove(self, name: str) -> None:
        """Remove a question whose requester does not wait any more."""
        self._questions.pop(name, None)
        self._unanswered.pop(name, None)

    def respond(self, frame: Frame, principal: Identity, *, holds_messages: bool) -> None:
        """Handle a reply; a reply to nothing is dropped without a word.

        A reply that does not say to what is one to the only push that the client has, if it `holds_messages` of none.
        """
        header = frame.header
        try:
            event, properties = read_message(frame.body, str(header.seq or ""), header.properties, principal.source)
        except InvalidMessageError as error:
            log.info("%s %s: a reply cannot be read: %s", PROTOCOL, self._peer, error)
            return
        name = properties.get(CORRELATION)
        if name is None and len(self._questions) == 1 and not holds_messages:
            (name,) = self._questions
        if name is not None:
            self._hub.respond(name, Reply(event.payload, without_correlation(event.headers)), principal)

    def acknowledged(self, name: str, *, subscribes: bool) -> None:
        """Handle the acknowledgement of what may be a question."""
        if name in self._questions:
            del self._questions[name]
            if subscribes:  # Java replies before it acknowledges, or never (3.8); others may still reply
                self._unanswered[name] = None
            else:
                self._hub.forget([name])

    def forget_acknowledged(self) -> None:
        """Remove the questions that the client has acknowledged: it replies to none of them any more."""
        self._hub.forget(self._unanswered)
        self._unanswered.clear()

    def forget(self) -> None:
        """Remove all questions, and tell their requesters: the client leaves."""
        self._hub.forget(self._questions)
        self._questions.clear()
        self.forget_acknowledged()

    # -- frames ------------------------------------------------------------------------------------------------------

    def encode(
        self,
        command: str,
        seq: bytes,
        topic: str,
        payload: bytes | None,
        headers: Headers,
        more: dict[str, str] | None = None,
    ) -> bytes:
        """Return the frame of a message to the client; `seq` is JSON."""
        surplus = self._decoder.answer_surplus
        flavour, body = encode_body(topic, payload, headers, more or {}, strict=surplus == OLD)
        return encode_message(surplus, command, seq, flavour, body)

    def _send(self, data: bytes) -> None:
        self._outbox.answer(lambda: data, len(data))
