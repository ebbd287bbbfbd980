"""The meaning of the frames of one EventMesh TCP connection (docs/specifications/eventmesh.md, 3.5 to 3.9).

This module knows who the client is, what it subscribes to and when it leaves; `publications`, `pushes` and `requests`
handle its messages.
"""

import logging
import math
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from babelbus.core.access import Identity, has_lost
from babelbus.core.receipt import Promise
from babelbus.core.request import Question
from babelbus.core.work import Work
from babelbus.errors import UNREADABLE, BabelbusError, PeerLeavesError
from babelbus.identities.errors import InvalidProofError
from babelbus.protocols import contract
from babelbus.protocols.contract import Continuation, Outbox, closed_if_refused
from babelbus.protocols.eventmesh import messages as m
from babelbus.protocols.eventmesh.callers import LOST, REFUSALS, Caller, Given, address_of, name_of
from babelbus.protocols.eventmesh.continuation import KeptCaller, KeptSession, encode_session, kept_agent
from babelbus.protocols.eventmesh.frames import (
    FRAME_BYTES_MAX,
    FrameDecoder,
    MalformedFrameError,
    encode_answer,
    encode_frame,
)
from babelbus.protocols.eventmesh.hub import PROTOCOL, STOPS, Hub
from babelbus.protocols.eventmesh.messages import Frame, SubscriptionItem, UserAgent
from babelbus.protocols.eventmesh.publications import Publications
from babelbus.protocols.eventmesh.pushes import Pushes
from babelbus.protocols.eventmesh.records import FLAVOUR, encode_body
from babelbus.protocols.eventmesh.requests import Requests
from babelbus.protocols.eventmesh.subscriptions import Subscribed

log = logging.getLogger(__name__)

HELLO_BYTES_MAX = 65_536
"""The limit of a frame before the client has said who it is."""
GOODBYE_SECONDS = 30.0
"""A client that has said goodbye, or was told goodbye, is closed after this if it has not closed (3.5)."""

_decode_agent = msgspec.json.Decoder(UserAgent).decode
_decode_subscription = msgspec.json.Decoder(m.Subscription).decode
_encode = msgspec.json.Encoder().encode


class Session(contract.Session):
    """One connection: who the client is, what it publishes, what it is sent."""

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        peer: str | None,
        kept: KeptSession | None = None,
    ) -> None:
        """Begin a session, or continue one that another server has `kept`."""
        self.heard_at = hub.clock.monotonic()
        self.ends_at = math.inf
        self.stays = False
        self._resting = False
        """Whether groups push nothing more, because the server stops."""
        self._hub = hub
        self._outbox = outbox
        self._close = close
        self._peer = peer or "local"
        self._decoder = FrameDecoder(frame_bytes_max=HELLO_BYTES_MAX)
        self._frames: list[Frame] = []
        self._agent: UserAgent | None = None
        self._caller: Caller | None = None
        self._address = address_of(peer)
        self._fault = ""
        """Why the session could not begin, if that was found out later."""
        self._listening = False
        self._leaving = False
        self._subscribed: dict[str, Subscribed] = {}
        self._requests = Requests(hub, outbox, self._decoder, self._peer)
        self._publications = Publications(hub, outbox, self._decoder)
        self._pushes = Pushes(hub, outbox, self._decoder, self._requests, self._subscribed)
        hub.peers[self] = None
        if kept is not None:
            with closed_if_refused(self.close):
                self._continue(kept)

    # -- frames ------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Handle one chunk.

        Raises:
            MalformedFrameError: the client broke the protocol; what came before was done.
            PeerLeavesError: the session could not begin, and the client was told.
        """
        self.heard_at = self._hub.clock.monotonic()
        self._decoder.receive_data(data)
        self.resume()

    def resume(self) -> None:
        """Continue with frames that were put off while the outbox was full, then with frames that came."""
        if self._fault:
            raise PeerLeavesError(self._fault)
        try:
            while self._frames or (found := self._decoder.frames()):
                frames = self._frames or found
                self._frames = []
                is_full = self._outbox.full
                for number, frame in enumerate(frames):
                    header = frame.header
                    name = header.cmd or header.command
                    if name in m.PUSH_ACKS:  # an ack takes no room
                        self._pushes.acknowledged(header.seq)
                        continue
                    if is_full:
                        self._frames = frames[number:]
                        return
                    if name in m.PUBLICATIONS and self._agent is not None:
                        self._publications.add(name, frame, self._identity)  # is answered behind all frames
                    else:
                        self._handle(name, frame)
                        is_full = self._outbox.full
        finally:
            self._settle()

    def _handle(self, name: str | None, frame: Frame) -> None:
        if name in m.UNANSWERED:
            return
        if name == m.RESPONSE:
            if self._agent is not None:
                self._requests.respond(frame, self._identity, holds_messages=self._pushes.are_held)
        elif name in m.ANSWERS:
            self._settle()
            self._command(name, frame)
        else:
            raise MalformedFrameError(f"unknown command {name!r}")

    def _command(self, name: str, frame: Frame) -> None:
        seq = _encode(frame.header.seq)
        if name == m.HELLO:
            self._hello(seq, frame.body)
        elif name == m.RECOMMEND:
            self._answer(name, seq, "registry enable config is false, not support")
        elif self._agent is None:
            self._refuse(name, seq, frame)
        elif name == m.HEARTBEAT:
            self._answer(name, seq)
        elif name == m.SUBSCRIBE:
            self._begin_to_subscribe(seq, frame.body)
        elif name == m.UNSUBSCRIBE:
            self._unsubscribe()
            self._requests.forget_acknowledged()
            self._answer(name, seq)
        elif name == m.LISTEN:
            self._listen(seq)
        elif name == m.REQUEST:
            self._requests.ask(seq, frame, self._identity)
        elif name == m.GOODBYE:
            self._unsubscribe()
            self._requests.forget()
            self.ends_at = self._hub.clock.monotonic() + GOODBYE_SECONDS
            self._answer(name, seq)
        else:
            self._answer(name, seq)  # REGISTER and UNREGISTER, which no client needs

    def _refuse(self, name: str, seq: bytes, frame: Frame) -> None:
        """Answer a request of a client that has not said who it is; Java ends at a refused question without a body."""
        text = f"no session is found for {self._peer}: say {m.HELLO} first"
        if name != m.REQUEST:
            self._answer(name, seq, text)
            return
        kind = m.CLOUD_EVENT if (frame.header.properties or {}).get("protocoltype") == m.CLOUD_EVENT else m.MESSAGE
        body = encode_body("none", text.encode(), ((FLAVOUR, kind.encode()),), {}, strict=True)[1]
        data = encode_answer(self._surplus, m.RESPONSE_TO_CLIENT, seq, text, body)
        self._outbox.answer(lambda: data, len(data))

    def _answer(self, request: str, seq: bytes, error: str = "") -> None:
        """Answer a request; an `error` is the text of a failure."""
        data = encode_answer(self._surplus, m.ANSWERS[request], seq, self._told(error))
        self._outbox.answer(lambda: data, len(data))

    def _told(self, error: str) -> str:
        """Return the text of a failure with the names as the client knows them."""
        return error if self._caller is None else self._caller.principal.relative_text(error)

    @property
    def _surplus(self) -> int:
        return self._decoder.answer_surplus

    # -- life --------------------------------------------------------------------------------------------------------

    def _hello(self, seq: bytes, body: bytes) -> None:
        if self._agent is not None:
            self._answer(m.HELLO, seq)
            return
        fault = "server is not running" if self._hub.stopping else ""
        agent = UserAgent()
        try:
            agent = _decode_agent(body)
        except UNREADABLE as error:
            fault = fault or f"the client's description cannot be read: {error}"
        if not fault and agent.version is None:
            fault = "client version cannot be null"
        if not fault and agent.purpose not in ("pub", "sub"):
            fault = "client purpose config is error"
        if not fault and not agent.group_name:
            fault = "client group cannot be null"
        given = Given(agent.username or "", agent.password or "", agent.token or "")
        agent.username = agent.password = agent.token = None  # kept no longer than it takes to check them
        callers = self._hub.callers
        caller = callers.unasked(agent.group_name, given)
        if not fault and callers.enforcing:
            try:
                found = callers.identify(given, self._address, self._outbox.peer_certificate)
            except REFUSALS as error:
                fault = str(error)
            else:
                if isinstance(found, Work):
                    self._prove(seq, agent, found)
                    return
                caller = found
        self._answer(m.HELLO, seq, fault)
        if fault:
            raise PeerLeavesError(fault)
        self._begin_session(agent, caller)

    def _begin_session(self, agent: UserAgent, caller: Caller) -> None:
        self._agent, self._caller = agent, caller
        self._decoder.frame_bytes_max = FRAME_BYTES_MAX

    def _prove(self, seq: bytes, agent: UserAgent, caller: Work[Caller]) -> None:
        """Answer HELLO when the password is checked; later frames wait for that."""

        def settle(_: Promise) -> None:
            if caller.error is None:
                self._begin_session(agent, caller.value)
            else:
                self._fault = str(caller.error)

        def encode() -> bytes:
            return encode_answer(surplus, m.ANSWERS[m.HELLO], seq, self._fault)

        surplus = self._surplus
        caller.when_done(settle)
        self._outbox.answer_when([caller], encode, self._outbox.bytes_max)

    @property
    def _identity(self) -> Identity:
        """The principal of a session that has begun."""
        assert self._caller is not None
        return self._caller.principal

    def _begin_to_subscribe(self, seq: bytes, body: bytes) -> None:
        """Answer a subscription when its topics and groups are there; later frames wait for that."""
        work = Work(self._subscribe(body))
        if work.done:
            self._answer(m.SUBSCRIBE, seq, work.value)
            return
        surplus, name = self._surplus, m.ANSWERS[m.SUBSCRIBE]

        def encode() -> bytes:
            error = work.value if work.error is None else str(work.error)
            return encode_answer(surplus, name, seq, self._told(error))

        self._outbox.answer_when([work], encode, self._outbox.bytes_max)

    async def _subscribe(self, body: bytes) -> str:
        """Add the topics of a subscription; return why not, or an empty text."""
        assert self._agent is not None
        if self._agent.purpose != "sub":
            return "client purpose config is not sub"
        try:
            items = _decode_subscription(body).topicList
        except UNREADABLE as error:
            return f"the subscription cannot be read: {error}"
        if not items:
            return "the subscription names no topic"
        for item in items:
            wanted = SubscriptionItem(item) if isinstance(item, str) else item
            before = self._subscribed.get(wanted.topic)
            if before is not None and before.item == wanted and not before.is_over:
                continue
            if before is None and len(self._subscribed) >= self._hub.settings.subscriptions_max:
                return f"{self._hub.settings.subscriptions_max} topics are subscribed to, which is the limit"
            caller = self._caller
            assert caller is not None
            try:
                if wanted.mode == "CLUSTERING" or caller.principal.rights is not None:
                    await self._hub.ensure_place(wanted, self._agent.group_name, caller.principal)
                else:
                    await self._hub.ensure_topic(wanted.topic, caller.principal)
            except BabelbusError as error:
                return str(error)  # an earlier subscription to the topic stays
            if self not in self._hub.peers:
                return "the client is gone"
            if before is not None:
                self._end(before)
            subscribed = self._subscribed[wanted.topic] = Subscribed(wanted, self._caller or caller, self._outbox.peer)
            try:
                if self._listening:
                    self._begin(subscribed)
            except BabelbusError as error:
                del self._subscribed[wanted.topic]
                self._end(subscribed)
                return str(error)
        return ""

    def _listen(self, seq: bytes) -> None:
        assert self._agent is not None
        if self._agent.purpose != "sub":
            self._answer(m.LISTEN, seq, "client purpose config is not sub")
            return
        error = ""
        if not self._listening:
            try:
                for subscribed in self._subscribed.values():
                    self._begin(subscribed)
                self._listening = True
            except BabelbusError as failure:
                error = str(failure)
                self._unsubscribe()
        self._answer(m.LISTEN, seq, error)  # before the first push, which comes in the next turn of the loop

    def _unsubscribe(self) -> None:
        for subscribed in self._subscribed.values():
            self._end(subscribed)
        self._subscribed.clear()

    def _begin(self, subscribed: Subscribed) -> None:
        assert self._agent is not None
        subscribed.begin(
            self._hub,
            self._agent.group_name,
            self._pushes.deliver,
            self._pushes.broadcast,
            self._ask,
            held=self._outbox.full or self._resting,
        )
        if self.stays:
            subscribed.end_questions(self._hub)

    def _end(self, subscribed: Subscribed, *, lost: bool = False) -> None:
        self._pushes.forget(subscribed.end(self._hub, lost=lost))

    def _ask(self, subscribed: Subscribed, question: Question) -> BabelbusError | None:
        return self._requests.push(subscribed.item.topic, question, self._identity)

    def _settle(self) -> None:
        """Append what was published and gathered, and acknowledge deliveries."""
        self._pushes.settle()
        self._publications.settle(self._caller)

    def _send(self, data: bytes) -> None:
        self._outbox.answer(lambda: data, len(data))

    # -- the connection ----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether frames are put off."""
        return bool(self._frames)

    @property
    def established(self) -> bool:
        """Whether the client has said who it is."""
        return self._agent is not None

    @property
    def unfinished_bytes(self) -> int:
        """Memory of a frame that has not come whole."""
        return self._decoder.held_bytes

    def release(self) -> None:
        """Resume deliveries: the outbox may have room again."""
        if not (self._outbox.full or self._resting):
            for subscribed in self._subscribed.values():
                if subscribed.member is not None:
                    subscribed.member.resume()

    def say_goodbye(self, reason: str) -> None:
        """Send the goodbye of the server; no delivery follows."""
        if self._agent is None or self._leaving:
            return
        self._leaving = True
        self._unsubscribe()
        self.ends_at = self._hub.clock.monotonic() + GOODBYE_SECONDS
        name = m.SERVER_GOODBYE.encode()
        header = b'{"cmd":"%b","command":"%b","code":0,"desc":%b}' % (name, name, _encode(reason))
        self._send(encode_frame(self._surplus, header))

    def access_changed(self) -> bool:
        """Check again who the client is, and what it may be sent; return whether that is less than before."""
        before = self._caller
        if before is None or before.principal is LOST:
            return False
        caller = self._hub.callers.renew(before, self._address, self._outbox.peer_certificate)
        if caller is None:
            self._lose()
            return True
        self._caller = caller
        for topic, subscribed in list(self._subscribed.items()):
            if subscribed.caller.principal.rights is caller.principal.rights:
                is_lost = subscribed.is_revoked(self._hub)
            else:
                is_lost = not self._begin_again(subscribed, caller)
            if is_lost:
                del self._subscribed[topic]
                self._end(subscribed)
        return has_lost(before.principal, caller.principal)

    def _begin_again(self, subscribed: Subscribed, caller: Caller) -> bool:
        """Update for whom a subscription is; return whether the principal may have it."""
        self._end(subscribed)
        subscribed.caller = caller
        try:
            if self._listening:
                self._begin(subscribed)
        except BabelbusError:
            return False
        return not subscribed.is_revoked(self._hub)

    def _lose(self) -> None:
        """Send a goodbye: what the client has proved does not hold any more. Until it is closed it may do nothing."""
        assert self._caller is not None
        self._caller = msgspec.structs.replace(self._caller, principal=LOST)
        self.say_goodbye("the credentials do not hold any more")
        self.ends_at = self._hub.clock.monotonic()

    def check_proof(self) -> None:
        """End the session if what the client has proved is over."""
        caller = self._caller
        if caller is not None and caller.principal is not LOST and not self._hub.callers.holds(caller):
            self._lose()

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The topics of the client."""
        return [(one.topic, False) for one in self._subscribed.values()]

    @property
    def principal(self) -> str | None:
        """Name of the principal that the client has proved to be."""
        return name_of(self._caller)

    def redirect(self, ip: str, port: int) -> None:
        """Send the client to another server, and end the session."""
        name = m.REDIRECT.encode()
        header = b'{"cmd":"%b","command":"%b","code":0}' % (name, name)
        self._send(encode_frame(self._surplus, header, _encode({"ip": ip, "port": port})))
        self.ends_at = self._hub.clock.monotonic() + GOODBYE_SECONDS

    def describe(self) -> dict[str, Any]:
        """Return who the client is and what it subscribes to, without its secrets."""
        agent = self._agent or UserAgent()
        host, _, port = self._peer.rpartition(":")
        return {
            "host": host, "port": port, "env": agent.env, "subsystem": agent.subsystem, "path": agent.path,
            "pid": agent.pid, "version": agent.version, "idc": agent.idc, "group": agent.group_name,
            "purpose": agent.purpose, "protocol": "tcp", "topics": [one.topic for one in self._subscribed.values()],
        }  # fmt: skip

    def expire(self) -> None:
        """Close the connection: the client has been silent for too long, or did not close after a goodbye."""
        log.info("%s %s: closing, the client is silent or has left", PROTOCOL, self._peer)
        self._close()

    def close(self) -> None:
        """Release what the session holds: the connection is gone."""
        self._hub.peers.pop(self, None)
        for subscribed in self._subscribed.values():
            self._end(subscribed, lost=not self._hub.stopping)
        self._subscribed.clear()
        self._pushes.clear()
        self._requests.end()
        self._requests.forget()

    # -- from one server to the next ---------------------------------------------------------------------------------

    @property
    def is_portable(self) -> bool:
        """Whether another server can continue the session: nobody leaves, or waits for a reply of another client."""
        return self._agent is not None and self.ends_at == math.inf and self._requests.is_idle

    @property
    def is_copyable(self) -> bool:
        """Whether only frames of the client or for it change what is kept, and groups send again what a copy misses.

        Messages that the client has not acknowledged come again, as after every crash; no broadcast does. A
        subscription whose topic was removed ends without a frame: a copy from before would begin it again.
        """
        return self.is_portable and not any(one.is_over or one.live is not None for one in self._subscribed.values())

    def rest(self) -> None:
        """Send nothing more of groups: the server is about to stop."""
        self._resting = True
        for subscribed in self._subscribed.values():
            if subscribed.member is not None:
                subscribed.member.hold()

    @property
    def owes_acks(self) -> bool:
        """Whether the client holds messages that it has not acknowledged."""
        return any(one.member is not None and one.member.in_flight for one in self._subscribed.values())

    def stay(self) -> None:
        """Send nothing more of groups, and no questions: neither acknowledgements nor replies are read any more."""
        self.rest()
        self.stays = True
        for subscribed in self._subscribed.values():
            subscribed.end_questions(self._hub)

    def end_waits(self) -> None:
        """Send the goodbye of a server that stops, unless that was done: the session ends here."""
        self.stays = False
        if self._hub.stopping:
            self.say_goodbye(STOPS)

    def continuation(self) -> Continuation | None:
        """Return what another server needs to continue the session; `None` if no other can."""
        if not self.is_portable:
            return None
        assert self._agent is not None
        assert self._caller is not None
        kept = KeptSession(
            owner=str(uuid.uuid4()),
            surplus=self._surplus,
            agent=kept_agent(self._agent),
            caller=KeptCaller.of(self._caller),
            subscriptions=[one.item for one in self._subscribed.values() if not one.is_over],
            listens=self._listening,
        )
        return Continuation(kept.owner, encode_session(kept), consumes=bool(self._subscribed))

    def _continue(self, kept: KeptSession) -> None:
        """Continue a session: all of it, or nothing, so that the client hears why when it subscribes again.

        Raises:
            BabelbusError: what the client has proved does not hold any more, or it may not have a subscription.
        """
        caller = self._hub.callers.renew(kept.caller.caller(), self._address, self._outbox.peer_certificate)
        if caller is None:
            raise InvalidProofError("the credentials do not hold any more")
        self._decoder.surplus = kept.surplus
        self._begin_session(kept.agent, caller)
        self._listening = kept.listens
        for item in kept.subscriptions:
            subscribed = self._subscribed[item.topic] = Subscribed(item, caller, self._outbox.peer)
            if self._listening:
                self._begin(subscribed)
