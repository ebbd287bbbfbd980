"""The meaning of the messages of one Wörterbuch client (docs/specifications/worterbuch.md, sections 4 to 10).

Requests are handled in order. Changes take effect at once and are logged together, at the end of a chunk or before
something that has to see them logged (a subscription); the answers of a chunk go out together.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from babelbus import __version__
from babelbus.core.access import AccessRefusedError
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.state import Change, NoSuchKeyError, subscription_pattern
from babelbus.errors import BabelbusError, RemoteProtocolError
from babelbus.listening.certificates import PeerCertificate
from babelbus.protocols.contract import Continuation, Sender, closed_if_refused
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.access import OWN_KEYS, Access
from babelbus.protocols.worterbuch.answers import Answers
from babelbus.protocols.worterbuch.codec import (
    AUTHENTICATED,
    AUTHORIZED,
    encode_ack,
    encode_handshake,
    encode_ls,
    encode_welcome,
)
from babelbus.protocols.worterbuch.continuation import (
    KeptNames,
    KeptSession,
    KeptSubscription,
    KeptWait,
    encode_session,
)
from babelbus.protocols.worterbuch.errors import (
    ErrorCode,
    FinalRefusalError,
    MalformedMessageError,
    RefusedError,
    UnauthorizedError,
)
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.names import SYS
from babelbus.protocols.worterbuch.peer import Framing, Peer, Subscriber
from babelbus.protocols.worterbuch.profiles import MAIN, Endpoint, Greeting, Profile, choose_handshake, for_major
from babelbus.protocols.worterbuch.subscriptions import SubscriptionRequests
from babelbus.protocols.worterbuch.testament import read_testament
from babelbus.protocols.worterbuch.translator import Translator
from babelbus.protocols.worterbuch.tree import TreeRequests

KEEPALIVE_TEXT = b'""'
KEEPALIVE_TICKS_MAX = 5
PROTOCOL_VERSION = "protocolVersion"


class Session(Peer):
    """One client of a connection: how it opens, what each chunk of its messages asks for, and who does that."""

    def __init__(
        self,
        hub: Hub,
        outbox: Sender,
        close: Callable[[], None],
        *,
        framing: Framing,
        endpoint: Endpoint,
        transport_name: str,
        address: str | None,
        certificate: PeerCertificate | None = None,
        kept: KeptSession | None = None,
    ) -> None:
        """Begin a session, or continue one that another server has `kept`."""
        super().__init__(
            hub.settings,
            hub.drop,
            outbox,
            close,
            transport_name=transport_name,
            address=address,
            client_id="" if kept is None else kept.client_id,
        )
        self._hub = hub
        self.framing = framing
        self._state = hub.state
        self._translator = translator = Translator(
            endpoint.profile, endpoint.symbols, key_bytes_max=hub.state.key_bytes_max
        )
        self.access = access = Access(hub.keeper, self.client_id, address, certificate)
        translator.settle(access.identity.root)
        self._answers = answers = Answers(self, hub, outbox, framing, translator, self._answer)
        self._tree = tree = TreeRequests(hub, self.client_id, translator, access, answers)
        subscriptions = SubscriptionRequests(self, hub, translator, access, answers)
        self._waits: list[KeptWait] = []
        """The waits for locks at another server, until `take_waits`."""
        self._heard = False
        self._silent_ticks = -1
        """Seconds since the client was heard; below 0: it never sent a keepalive."""
        self._greeting: asyncio.TimerHandle | None = None
        self._greeted = False
        """Whether the first message of the server is out: some clients leave when another one comes before it."""
        self._handlers: dict[type, Callable[[Any], bytes]] = {
            m.ProtocolSwitch: self._switch,
            m.Authorization: self._authorize,
            m.Authentication: self._authenticate,
            m.Handshake: self._shake_hands,
            m.Transform: _refuse,
            m.Export: _refuse_file,
            m.Import: _refuse_file,
            **m.handlers_of(tree),
            **m.handlers_of(subscriptions),
        }
        hub.join(self)
        if kept is not None:
            with closed_if_refused(self.close):
                self._continue(kept)

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Send the welcome, unless the client's handshake comes first; in the main profile it may come for a while."""
        if self.profile.greeting is Greeting.WELCOME:
            wait = self._hub.settings.handshake_wait_seconds
            if wait and self.profile is MAIN:
                self._greeting = self._hub.later(wait, self._greet)
            else:
                self._greet()

    def _greet(self) -> None:
        self._greeting = None
        self._greeted = True
        info = self.profile.info(__version__, authorization=self.access.locked)
        self._answers.send(encode_welcome(self.client_id, info))

    def close(self) -> None:
        """End the session: the connection is gone."""
        self._release(self._hub.leave)

    def leave(self) -> None:
        """Release the client: another server continues its session."""
        self._release(self._hub.forget)

    def _release(self, end: Callable[[Peer], None]) -> None:
        if not self._handlers:  # closed before
            return
        self._over = True
        if self._greeting is not None:
            self._greeting.cancel()
        end(self)
        self._handlers.clear()  # these hold the session: without them reference counting frees it
        del self._answers, self._tree

    # -- from one server to the next ---------------------------------------------------------------------------------

    @property
    def is_copyable(self) -> bool:
        """Whether a continuation has no effect, and nothing but a byte of the client or for it changes its content.

        A client of a dialect with keepalives is never quiet.
        """
        if self._greeting is not None or self._over or self.profile.keepalive or self._silent_ticks >= 0:
            return False
        if self._pushed or self._answers.replies:
            return False
        subscribers = (*self.subscribers.values(), *self.ls_subscribers.values())
        return all(one.is_copyable for one in subscribers)

    def continuation(self) -> Continuation | None:
        """Return what another server needs to continue the session; what was collected for the client is sent."""
        if self._greeting is not None:
            return None
        for subscriber in self.subscribers.values():
            subscriber.send_pending()
        self.flush()
        locks, shown = self._state.locks, f"{SYS}/clients/{self.client_id}"
        kept = KeptSession(
            client_id=self.client_id,
            transport_name=self.transport_name,
            profile=self.profile.name,
            symbols=self._translator.symbols,
            privileges=self.access.privileges,
            locked=self.access.locked,
            greeted=self._greeted,
            sends_keepalives=self._silent_ticks >= 0,
            subscriptions=[
                KeptSubscription(number, one.subject or "", one.pattern, one.unique, one.aggregate_ms)
                for number, one in self.subscribers.items()
            ],
            names=[KeptNames(number, one.subject, one.names) for number, one in self.ls_subscribers.items()],
            shown=[
                (name, value)
                for name in (*OWN_KEYS, PROTOCOL_VERSION)
                if (value := self._state.find(f"{shown}/{name}")) is not None
            ],
            streams=self._tree.streams,
            locks=[key for key in locks.keys(self.client_id) if locks.holder(key) == self.client_id],
            waits=[KeptWait(*wait) for wait in locks.waits(self.client_id)],
            has_testament=self._state.has_testament(self.client_id),
        )
        return Continuation(self.client_id, encode_session(kept))

    def _continue(self, kept: KeptSession) -> None:
        """Continue a session; the caller lets it wait for its locks again when all clients have theirs.

        Raises:
            BabelbusError: the principal of the client is gone, or has other rights now, or the session has ended.
        """
        hub, access = self._hub, self.access
        if kept.has_testament and not self._state.has_testament(self.client_id):
            # Its link was lost before the owner died, and its member had not seen yet that the owner lived.
            raise BabelbusError("the last owner has ended the session, and executed its testament")
        access.restore(kept.privileges, locked=kept.locked)
        self._translator.settle(access.identity.root)
        self._greeted = kept.greeted
        self._tree.streams.update(kept.streams)
        self._waits = kept.waits
        self._silent_ticks = 0 if kept.sends_keepalives else -1
        for name, value in kept.shown:
            self._state.put(f"{SYS}/clients/{self.client_id}/{name}", value)
        for key in kept.locks:
            access.state.locks.lock(key, self.client_id)
        for one in kept.subscriptions:
            subscriber = Subscriber(
                self,
                one.transaction_id,
                one.subject,
                unique=one.unique,
                pattern=one.pattern,
                aggregate_ms=one.aggregate_ms,
            )
            hub.subscribe(subscriber, subscription_pattern(one.subject))
            subscriber.since = self._state.commit_number
            self.subscribers[one.transaction_id] = subscriber
            hub.show_subscription(subscriber)
        for names in kept.names:
            subscriber = self.ls_subscribers[names.transaction_id] = Subscriber(
                self, names.transaction_id, names.parent
            )
            subscriber.names = names.names
            hub.subscribe_ls(subscriber)
        hub.commit()

    def take_waits(self) -> list[KeptWait]:
        """Return the waits for locks of a session that goes on, once."""
        waits, self._waits = self._waits, []
        return waits

    def wait_again(self, wait: KeptWait) -> None:
        """Wait for a lock at the end of its queue, or take it if it is free by now."""
        for number in wait.waits:
            if self.access.state.locks.acquire(wait.key, self.client_id, number, wait.place):
                self.send_granted((number,))

    def tick(self) -> None:
        """Send and expect the keepalives of profiles that have them (section 13.1); called every second."""
        if self.profile.keepalive and self._greeted:
            if not self.sent:
                self._answers.send(KEEPALIVE_TEXT)
            if self._heard:
                self._silent_ticks = min(self._silent_ticks, 0)
            elif self._silent_ticks >= 0:
                self._silent_ticks += 1
                if self._silent_ticks > KEEPALIVE_TICKS_MAX:
                    self._close()
        self.sent = self._heard = False

    @property
    def profile(self) -> Profile:
        """The dialect that the client speaks now."""
        return self._translator.profile

    @property
    def established(self) -> bool:
        """Whether the client has proved what it has to: one that needs a token and shows none is closed in time."""
        return not self.access.locked

    # -- what it did not ask for -------------------------------------------------------------------------------------

    @property
    def form(self) -> str:
        """Clients of an equal form get the same bytes for the same change and subscription."""
        return f"{id(self.framing)} {self._translator.form}"

    def encode_run(self, subscriber: Subscriber, changes: Sequence[Change]) -> list[bytes]:
        """Return the messages that a run of changes is for a subscriber, one each."""
        return self._translator.encode_run(subscriber, changes)

    def encode_collected(self, subscriber: Subscriber, changes: Sequence[Change]) -> bytes:
        """Return one message with changes of one kind for a subscriber of a pattern, no bytes without a message."""
        return self._translator.encode_collected(subscriber, changes)

    def encode_names(self, subscriber: Subscriber, names: Sequence[str]) -> bytes:
        """Return the message that tells an ls subscriber the names below its parent."""
        return encode_ls(subscriber.transaction_id, names)

    # -- requests ----------------------------------------------------------------------------------------------------

    def receive(self, messages: list[m.ClientMessage] | m.SetRun) -> list[m.ClientMessage]:
        """Handle the messages of one chunk; return those that are left for later.

        A few requests may ask for more than the client takes in time.

        Raises:
            RemoteProtocolError: the client broke the protocol; what came before it was done and answered.
        """
        self._heard = True
        answers = self._answers
        answers.heavy_bytes = 0
        if self._greeting is not None and messages:
            self._greeting.cancel()
            if not isinstance(messages, m.SetRun) and isinstance(messages[0], m.Handshake):
                self._greeting = None  # a client of 0.3 to 0.6: the answer is the first that it reads
            else:
                self._greet()
        if isinstance(messages, m.SetRun):
            if self._set_all(messages):
                return []
            messages = messages.messages()
        rest = messages[self._receive_each(messages) :]
        answers.finish()
        return rest

    def _set_all(self, run: m.SetRun) -> bool:
        """Handle sets by columns, in half of the time; return whether they were handled.

        Keys with a wildcard, a version or a privilege of a token are left to `_receive_each`, and so are refusals.
        """
        if not self._translator.native:
            return False
        keys = run.keys
        joined = "\n".join(keys)
        if "?" in joined or "#" in joined or "$" in joined or "!" in joined:
            return False
        if max(map(len, keys)) >= self._translator.short or not self.access.may_set_all(keys):
            return False
        if not self._state.set_all(keys, run.values):
            return False
        self._answers.finish_run(run)
        return True

    def _receive_each(self, messages: Sequence[m.ClientMessage]) -> int:
        """Handle messages one by one; return how many were handled."""
        answers, access, translator = self._answers, self.access, self._translator
        bytes_max = self._outbox.bytes_max
        for number, message in enumerate(messages, 1):
            kind = type(message)
            if kind is m.Keepalive:
                self._silent_ticks = max(self._silent_ticks, 0)
                continue
            if kind not in translator.profile.kinds or access.locked:
                self._check_allowed(message)
            try:
                reply = self._answer(message)
            except FinalRefusalError as error:
                self._refuse_and_end(message, error.code, error.text)
            if reply:
                answers.add(message, reply)
            if answers.heavy_bytes > bytes_max:
                return number
        return len(messages)

    def _check_allowed(self, message: m.ClientMessage) -> None:
        """Check that the dialect has a message, and that the client may send it before it is authorized.

        Raises:
            RemoteProtocolError: the message is refused; the refusal was answered.
        """
        kind = type(message)
        refusal = None if kind is m.Handshake else self._translator.profile.refusal(message)
        if refusal is ErrorCode.NOT_IMPLEMENTED:
            self._refuse_and_end(message, refusal, "not in this version of the protocol")
        # Clients of 0.3 to 0.6 cannot prove anything: a server that needs a token serves them nothing.
        if self.access.locked and kind not in (m.ProtocolSwitch, m.Authorization, m.Authentication):
            self._refuse_and_end(message, ErrorCode.AUTHORIZATION_REQUIRED, "authorization is required first")

    def _answer(self, message: m.ClientMessage) -> bytes:
        translator = self._translator
        try:
            if not translator.usual:
                message = translator.read(message)
            return self._handlers[type(message)](message)
        except RefusedError as error:
            return translator.encode_error(getattr(message, "transaction_id", 0), error.code, error.text)
        except AccessRefusedError as error:
            return translator.encode_error(getattr(message, "transaction_id", 0), ErrorCode.UNAUTHORIZED, str(error))
        except QuotaExceededError as error:
            return translator.encode_error(getattr(message, "transaction_id", 0), ErrorCode.OTHER, str(error))
        except NoSuchKeyError as error:
            return translator.encode_error(getattr(message, "transaction_id", 0), ErrorCode.NO_SUCH_VALUE, str(error))

    def malformed(self, error: MalformedMessageError) -> None:
        """Answer what was no message, if it can be told which one; the connection ends then."""
        if error.transaction_id is not None:
            code = ErrorCode(error.code)
            self._answers.send(self._translator.encode_error(error.transaction_id, code, str(error)))

    def _refuse_and_end(self, message: m.ClientMessage, code: ErrorCode, text: str) -> NoReturn:
        """Answer a request with an error and end the connection.

        Raises:
            RemoteProtocolError: always.
        """
        self._answers.finish()
        transaction_id = getattr(message, "transaction_id", 0)
        self._answers.send(self._translator.encode_error(transaction_id, code, text))
        raise RemoteProtocolError(f"{type(message).__name__}: {text}")

    # -- connection --------------------------------------------------------------------------------------------------

    def _switch(self, message: m.ProtocolSwitch) -> bytes:
        profile = for_major(message.version)
        if profile is None:
            raise FinalRefusalError(ErrorCode.PROTOCOL_NEGOTIATION_FAILED, f"no version {message.version}")
        self._use(profile)
        if self._hub.settings.extended_monitoring:
            self._hub.show(f"clients/{self.client_id}/{PROTOCOL_VERSION}", message.version)
        return encode_ack(0)

    def _use(self, profile: Profile) -> None:
        self._translator.speak(profile)
        self._forget_shapes()

    def _forget_shapes(self) -> None:
        """Drop the shapes of subscribers: others would get bytes of this dialect, or of this root."""
        for subscriber in (*self.subscribers.values(), *self.ls_subscribers.values()):
            subscriber.shape = ""

    def _authorize(self, message: m.Authorization) -> bytes:
        try:
            self.access.authorize(message.token)
        except UnauthorizedError as error:
            raise FinalRefusalError(ErrorCode.UNAUTHORIZED, str(error)) from error
        self._translator.settle(self.access.identity.root)
        self._forget_shapes()
        if self.access.name is not None:
            self._hub.keeper.login(self.access.name, self.address)
        return AUTHORIZED

    def _authenticate(self, message: m.Authentication) -> bytes:
        self.access.authenticate(message.token)
        return AUTHENTICATED

    def _shake_hands(self, message: m.Handshake) -> bytes:
        profile = choose_handshake(message.versions)
        if profile is None:
            versions = ", ".join(f"{major}.{minor}" for major, minor in message.versions)
            raise RefusedError(ErrorCode.PROTOCOL_NEGOTIATION_FAILED, f"none of these versions: {versions}")
        goods, will = message.grave_goods, message.last_will
        testament = read_testament(self.access, goods, will, key_bytes_max=self._state.key_bytes_max)
        self._answers.finish()  # what was asked before is answered, and told, in the dialect of before
        self._use(profile)
        self._greeted = True
        self._state.set_testament(self.client_id, testament, self.access.identity.name)
        symbols = self._translator.symbols
        return encode_handshake(profile.version, symbols.separator, symbols.wildcard, symbols.multi_wildcard)


def _refuse(_message: m.Transform) -> bytes:
    raise FinalRefusalError(ErrorCode.NOT_IMPLEMENTED, "transform was never implemented")


def _refuse_file(_message: m.Export | m.Import) -> bytes:
    raise RefusedError(ErrorCode.OTHER, "files on the server are not for clients; use the HTTP export and import")


class Carrier:
    """A connection with one session: what its server asks of the session."""

    session: Session

    @property
    def established(self) -> bool:
        """Whether the client has proved its rights, if a token is needed."""
        return self.session.established

    @property
    def is_portable(self) -> bool:
        """Whether another server can continue the session."""
        return True

    @property
    def is_copyable(self) -> bool:
        """Whether a continuation that is made now has no effect, and stays true until a byte comes or goes."""
        return self.is_portable and self.session.is_copyable

    def continuation(self) -> Continuation | None:
        """Return what another server needs to continue the session."""
        return self.session.continuation()

    def leave(self) -> None:
        """Release the client: another server continues its session."""
        self.session.leave()

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The patterns of the client, and of each whether only a part of it is granted."""
        return self.session.subscriptions

    @property
    def principal(self) -> str | None:
        """Name of the principal that the client has proved to be."""
        return self.session.access.name

    def close(self) -> None:
        """End the session: the connection is gone."""
        self.session.close()
