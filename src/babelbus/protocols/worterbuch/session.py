"""What the messages of one Wörterbuch client mean (specs/worterbuch.md, sections 4 to 10).

Requests are handled in order. Changes take effect at once and are logged together, at the end of a chunk or before
something that has to see them logged (a subscription); the answers of a chunk go out together.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from babelbus.core.locks import LockHeldError, NotLockedError
from babelbus.core.names import KeyPattern
from babelbus.core.record import Receipt
from babelbus.core.state import NoSuchKeyError, Testament, VersionedError, VersionMismatchError
from babelbus.core.state_log import Change
from babelbus.core.subject import exactly
from babelbus.errors import RemoteProtocolError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch import peer
from babelbus.protocols.worterbuch.codec import (
    encode_ack,
    encode_authenticated,
    encode_authorized,
    encode_cstate,
    encode_error,
    encode_handshake,
    encode_ls,
    encode_pstate,
    encode_pstate_deleted,
    encode_state,
    encode_state_deleted,
    encode_welcome,
)
from babelbus.protocols.worterbuch.errors import ErrorCode, MalformedMessageError, UnauthorizedError
from babelbus.protocols.worterbuch.hub import ELEMENTS_MAX, SYS, Hub, has_too_many_elements, is_below_sys
from babelbus.protocols.worterbuch.patterns import (
    check_key,
    check_parent_pattern,
    check_pattern,
    children_pattern,
    store_pattern,
    subscription_pattern,
)
from babelbus.protocols.worterbuch.peer import Peer
from babelbus.protocols.worterbuch.privileges import Privilege, Privileges, proves_secret
from babelbus.protocols.worterbuch.profiles import MAIN, Greeting, Profile, choose_handshake, for_major
from babelbus.protocols.worterbuch.subscriber import DELETED, Subscriber, encode_run
from babelbus.protocols.worterbuch.symbols import USUAL, Symbols

OWN_KEYS = ("graveGoods", "lastWill", "clientName")
"""What a client may write below `$SYS/clients/<its id>` (section 9.2)."""
KEEPALIVE_TEXT = b'""'
KEEPALIVE_TICKS_MAX = 5
HEAVY_BYTES = 16_384
"""Larger answers are counted against what one connection may make the server hold."""
ACK = b'{"ack":{"transactionId":%d}}'


class Framing(peer.Framing, Protocol):
    """How messages and answers stand on a connection."""

    def encode_acks(self, transaction_ids: Sequence[int]) -> bytes:
        """Give the bytes that carry an `ack` for each of these."""


class RefusedError(Exception):
    """A request that is answered with an error; the connection goes on."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Session(Peer):
    """One client of a connection: its profile, what it may do, what it subscribed to."""

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        framing: Framing,
        profile: Profile,
        transport_name: str,
        address: str | None,
        symbols: Symbols = USUAL,
    ) -> None:
        super().__init__(
            hub, outbox, close, client_id=str(uuid.uuid4()), transport_name=transport_name, address=address
        )
        self.framing: Framing = framing
        self.profile = profile
        self.symbols = symbols
        self._state = hub.state
        self._privileges: Privileges | None = None
        self._locked_out = hub.options.verifier is not None
        """Whether requests are refused until the client is authorised."""
        self._streams: dict[int, str] = {}
        self._heavy_bytes = 0
        self._replies: list[bytes] = []
        self._done: list[m.ClientMessage] = []
        """The requests that `_replies` answer, one each."""
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
            m.Get: self._get,
            m.CGet: self._cget,
            m.PGet: self._pget,
            m.Set: self._set,
            m.CSet: self._cset,
            m.SPubInit: self._spub_init,
            m.SPub: self._spub,
            m.Publish: self._publish,
            m.Subscribe: self._subscribe,
            m.PSubscribe: self._psubscribe,
            m.Unsubscribe: self._unsubscribe,
            m.Delete: self._delete,
            m.PDelete: self._pdelete,
            m.Ls: self._list,
            m.PLs: self._list_matching,
            m.SubscribeLs: self._subscribe_ls,
            m.UnsubscribeLs: self._unsubscribe_ls,
            m.Lock: self._lock,
            m.AcquireLock: self._acquire,
            m.ReleaseLock: self._release,
            m.Transform: self._refuse,
            m.Export: self._refuse_file,
            m.Import: self._refuse_file,
        }
        hub.join(self)

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Greet the client, unless its profile waits for its handshake, or main ones may wait a little for one."""
        if self.profile.greeting is Greeting.WELCOME:
            wait = self._hub.options.handshake_wait_seconds
            if wait and self.profile is MAIN:
                self._greeting = self._hub.later(wait, self._greet)
            else:
                self._greet()

    def _greet(self) -> None:
        self._greeting = None
        self._greeted = True
        info = self.profile.info(self._hub.options.version, authorization=self._locked_out)
        self._send(encode_welcome(self.client_id, info))

    def close(self) -> None:
        """The connection is gone."""
        self._over = True
        if self._greeting is not None:
            self._greeting.cancel()
        self._hub.leave(self)

    def tick(self) -> None:
        """A second has passed: keepalives of the profiles that have them (section 13.1)."""
        if self.profile.keepalive and self._greeted:
            if not self._sent:
                self._send(KEEPALIVE_TEXT)
            if self._heard:
                self._silent_ticks = min(self._silent_ticks, 0)
            elif self._silent_ticks >= 0:
                self._silent_ticks += 1
                if self._silent_ticks > KEEPALIVE_TICKS_MAX:
                    self._close()
        self._sent = self._heard = False

    # -- output ------------------------------------------------------------------------------------------------------

    @property
    def form(self) -> str:
        """Clients of an equal form get the same bytes for the same change and subscription."""
        symbols = "" if self.symbols.usual else repr(self.symbols)
        return f"{id(self.framing)} {self.profile.name} {symbols}"

    def encode_run(self, subscriber: Subscriber, changes: Sequence[Change]) -> list[bytes]:
        """Give the messages that a run of changes is for a subscriber, one each."""
        return encode_run(self, subscriber, changes)

    def encode_collected(self, subscriber: Subscriber, changes: Sequence[Change]) -> bytes:
        """Give the one message that changes of one kind are for a subscriber of a pattern, nothing if it is none."""
        assert subscriber.pattern is not None
        deleted = changes[0][0] is DELETED
        encode = encode_pstate_deleted if deleted else encode_pstate
        pairs = self.write_pairs([(key or "", value) for _, key, value, _, _ in changes])
        if not pairs or (deleted and not self.profile.deletions):
            return b""
        return encode(subscriber.transaction_id, subscriber.pattern, pairs)

    def encode_names(self, subscriber: Subscriber, names: Sequence[str]) -> bytes:
        """Give the message that tells an ls subscriber the names below its parent."""
        return encode_ls(subscriber.transaction_id, names)

    def _send(self, text: bytes) -> None:
        data = self.framing.encode((text,))
        self._sent = True
        if len(data) > HEAVY_BYTES:
            self._heavy_bytes += len(data)
        self._outbox.answer(lambda: data, len(data))

    def send_granted(self, waits: Sequence[int]) -> None:
        """Answer `acquireLock` requests: no event, so never dropped."""
        if waits and not self._over:
            self._sent = True
            data = self.framing.encode_acks(waits)
            self._outbox.answer(lambda: data, len(data))

    def _send_snapshot(self, receipt: Receipt, encode: Callable[[], bytes]) -> None:
        """Send what a subscription begins with; when changes that it shows are not stored after all, what is."""
        text = encode()
        if receipt.done:
            if text:
                self._send(text)
            return

        def settle() -> bytes:
            settled = text if receipt.error is None else encode()
            return self.framing.encode((settled,)) if settled else b""

        self._heavy_bytes += len(text)
        self._outbox.answer_when([receipt], settle, len(text))

    # -- requests ----------------------------------------------------------------------------------------------------

    def receive(self, messages: Sequence[m.ClientMessage]) -> int:
        """Do what the messages of one chunk ask for; give how many were done.

        The rest is for later: a few requests may ask for more than the client takes in time.

        Raises:
            RemoteProtocolError: the client broke the protocol; what came before it was done and answered.
        """
        self._heard = True
        self._heavy_bytes = 0
        if self._greeting is not None and messages:
            self._greeting.cancel()
            if isinstance(messages[0], m.Handshake):
                self._greeting = None  # a client of 0.3 to 0.6: the answer is the first that it reads
            else:
                self._greet()
        done = self._receive_freely(messages) if self._free else self._receive_each(messages)
        self._finish()
        return done

    @property
    def established(self) -> bool:
        """Whether the client has proved what it has to: one that needs a token and shows none is closed in time."""
        return not self._locked_out

    @property
    def _free(self) -> bool:
        """Whether no request needs leave or translation."""
        return self.profile is MAIN and not self._locked_out and self._privileges is None and self.symbols.usual

    def _receive_freely(self, messages: Sequence[m.ClientMessage]) -> int:
        """Do it where nothing needs leave: the two most frequent requests without a call for each."""
        bytes_max = self._outbox.bytes_max
        values = self._state
        set_value, find = values.set, values.find
        done, replies = self._done.append, self._replies.append
        for number, message in enumerate(messages, 1):
            if type(message) is m.Set:
                key = message.key
                if not ("?" in key or "#" in key or key[:1] == "$" or len(key) >= ELEMENTS_MAX):
                    try:
                        set_value(key, message.value)
                    except VersionedError as error:
                        reply = self._error(message.transaction_id, ErrorCode.CAS, str(error))
                    else:
                        reply = ACK % message.transaction_id
                    done(message)
                    replies(reply)
                    continue
            elif type(message) is m.Get:
                value = find(message.key)
                if value is not None and len(value) <= HEAVY_BYTES:
                    done(message)
                    replies(b'{"state":{"transactionId":%d,"value":%b}}' % (message.transaction_id, value))
                    continue
            self._receive_one(message)
            if self._heavy_bytes > bytes_max:
                return number
            if self.profile is not MAIN:  # a handshake: what follows is for another dialect
                return number + self._receive_each(messages[number:])
            done, replies = self._done.append, self._replies.append  # a subscription begins new lists
        return len(messages)

    def receive_sets(self, run: m.SetRun) -> bool:
        """Do a chunk of nothing but sets, as who loads or feeds the tree sends them; say whether it was done.

        About half of what one by one costs: one look for wildcards in all keys, one format for all answers. When a
        key needs a look of its own nothing was done.
        """
        if not self._free or self._greeting is not None:
            return False
        keys = run.keys
        joined = "\n".join(keys)
        if "?" in joined or "#" in joined or "$" in joined or max(map(len, keys)) >= ELEMENTS_MAX:
            return False
        if not self._state.set_all(keys, run.values):
            return False
        self._heard = True
        transaction_ids = run.transaction_ids
        receipt = self._state.commit(self.source)
        self._hub.received.inc(len(keys), 0)
        self._sent = True
        if receipt.done and receipt.error is None:
            data = self.framing.encode_acks(transaction_ids)
            self._outbox.answer(lambda: data, len(data))
            return True

        def settle() -> bytes:
            if receipt.error is None:
                return self.framing.encode_acks(transaction_ids)
            text = str(receipt.error)
            return self.framing.encode([self._error(one, ErrorCode.IO_ERROR, text) for one in transaction_ids])

        self._outbox.answer_when([receipt], settle, 32 * len(keys))
        return True

    def _receive_each(self, messages: Sequence[m.ClientMessage]) -> int:
        for number, message in enumerate(messages, 1):
            self._receive_one(message)
            if self._heavy_bytes > self._outbox.bytes_max:
                return number
        return len(messages)

    def _receive_one(self, message: m.ClientMessage) -> None:
        kind = type(message)
        if kind is m.Keepalive:
            self._silent_ticks = max(self._silent_ticks, 0)
            return
        refusal = None if kind is m.Handshake else self.profile.refusal(message)
        if refusal is ErrorCode.NOT_IMPLEMENTED:
            self._refuse_and_end(message, refusal, "not in this version of the protocol")
        # Clients of 0.3 to 0.6 cannot prove anything: where it is needed, there is nothing for them.
        if self._locked_out and kind not in (m.ProtocolSwitch, m.Authorization, m.Authentication):
            self._refuse_and_end(message, ErrorCode.AUTHORIZATION_REQUIRED, "authorization is required first")
        reply = self._answer(message)
        if reply:
            self._done.append(message)
            self._replies.append(reply)
            if len(reply) > HEAVY_BYTES:
                self._heavy_bytes += len(reply)

    def _answer(self, message: m.ClientMessage) -> bytes:
        try:
            if not self.symbols.usual:
                message = self._read_symbols(message)
            return self._handlers[type(message)](message)
        except RefusedError as error:
            return self._error(getattr(message, "transaction_id", 0), error.code, error.text)
        except NoSuchKeyError as error:
            return self._error(getattr(message, "transaction_id", 0), ErrorCode.NO_SUCH_VALUE, str(error))

    def malformed(self, error: MalformedMessageError) -> None:
        """Answer what was no message, if it can be told which one; the connection ends then."""
        if error.transaction_id is not None:
            self._send(self._error(error.transaction_id, ErrorCode(error.code), str(error)))

    def _refuse_and_end(self, message: m.ClientMessage, code: ErrorCode, text: str) -> None:
        """Answer a request with an error and end the connection.

        Raises:
            RemoteProtocolError: always.
        """
        self._finish()
        self._send(self._error(getattr(message, "transaction_id", 0), code, text))
        raise RemoteProtocolError(f"{type(message).__name__}: {text}")

    def _finish(self) -> Receipt:
        """Log what was changed, and answer everything that was asked up to here; give when it is stored."""
        receipt = self._state.commit(self.source)
        done, replies = self._done, self._replies
        if not done:
            return receipt
        self._done, self._replies = [], []
        hub = self._hub
        hub.received.inc(len(done), 0)
        self._sent = True
        if receipt.done and receipt.error is None:
            data = self.framing.encode(replies)
            self._outbox.answer(lambda: data, len(data))
        else:
            self._outbox.answer_when(
                [receipt], lambda: self.framing.encode(self._settle(done, replies, receipt)), sum(map(len, replies))
            )
        return receipt

    def _settle(self, done: list[m.ClientMessage], replies: list[bytes], receipt: Receipt) -> list[bytes]:
        """Give the answers once it is known whether the changes are stored; if not, none of them was."""
        if receipt.error is None:
            return replies
        text = str(receipt.error)
        settled = []
        for message, reply in zip(done, replies, strict=True):
            if isinstance(message, CHANGING):
                settled.append(self._error(message.transaction_id, ErrorCode.IO_ERROR, text))
            elif isinstance(message, READING):
                settled.append(self._answer(message))
            else:
                settled.append(reply)
        return settled

    def _error(self, transaction_id: int, code: ErrorCode, text: str) -> bytes:
        return encode_error(transaction_id, self.profile.error_code(code), text)

    # -- what is allowed ---------------------------------------------------------------------------------------------

    def _need(self, privilege: Privilege, pattern: str) -> None:
        """See that the client may do this.

        Raises:
            RefusedError: it may not.
        """
        privileges = self._privileges
        if privileges is not None and not privileges.may(privilege, pattern):
            raise RefusedError(ErrorCode.UNAUTHORIZED, f"no privilege to {privilege} '{pattern}'")

    def _check_elements(self, text: str) -> None:
        if has_too_many_elements(text):
            raise RefusedError(ErrorCode.OTHER, f"'{text[:80]}...' has more than {ELEMENTS_MAX} elements")

    def _check_key(self, key: str) -> None:
        self._check_elements(key)
        code = check_key(key)
        if code is not None:
            if self.profile.historic_wildcards:
                code = ErrorCode.ILLEGAL_WILDCARD
            raise RefusedError(ErrorCode(code), f"'{key}' has a wildcard where a key is needed")

    def _check_writable(self, key: str) -> None:
        """See that a key or pattern is not the server's own (section 9.2)."""
        if is_below_sys(key):
            elements = key.split("/")
            own = len(elements) >= 4 and elements[1:3] == ["clients", self.client_id] and elements[3] in OWN_KEYS
            if not own:
                raise RefusedError(ErrorCode.READ_ONLY_KEY, f"'{key}' is read-only")

    # -- the client's own characters (section 13.1) ------------------------------------------------------------------

    def _read_symbols(self, message: m.ClientMessage) -> m.ClientMessage:
        """Give a request with its keys and patterns in our characters."""
        changes: dict[str, Any] = {}
        for field in ("key", "pattern", "parent", "parent_pattern"):
            text = getattr(message, field, None)
            if text is not None:
                changes[field] = self._read_text(text)
        if isinstance(message, m.Handshake):
            changes["last_will"] = tuple((self._read_text(key), value) for key, value in message.last_will)
            changes["grave_goods"] = tuple(map(self._read_text, message.grave_goods))
        return msgspec.structs.replace(message, **changes) if changes else message

    def _read_text(self, text: str) -> str:
        read = self.symbols.read(text)
        if read is None:
            raise RefusedError(ErrorCode.OTHER, f"'{text}' has an element that stands for something else here")
        return read

    def _write_pattern(self, pattern: str) -> str:
        """Give back what `_read_symbols` made of a pattern: exactly what the client sent."""
        return self.symbols.write(pattern) or pattern

    def _pair_key(self, key: str) -> str | None:
        """Give what stands beside the value in `state`, in the profiles that have it."""
        return self.symbols.write(key) if self.profile.pairs else None

    def write_pairs(self, pairs: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """Give pairs with their keys in the client's characters, without those that these cannot express."""
        if self.symbols.usual:
            return pairs
        return [(written, value) for key, value in pairs if (written := self.symbols.write(key)) is not None]

    # -- connection --------------------------------------------------------------------------------------------------

    def _switch(self, message: m.ProtocolSwitch) -> bytes:
        profile = for_major(message.version)
        if profile is None:
            self._refuse_and_end(message, ErrorCode.PROTOCOL_NEGOTIATION_FAILED, f"no version {message.version}")
            raise AssertionError
        self._use(profile)
        if self._hub.options.extended_monitoring:
            self._hub.show(f"clients/{self.client_id}/protocolVersion", message.version)
        return encode_ack(0)

    def _use(self, profile: Profile) -> None:
        self.profile = profile
        for subscriber in (*self.subscribers.values(), *self.ls_subscribers.values()):
            subscriber.take_shape()  # or others would get bytes of this dialect

    def _authorize(self, message: m.Authorization) -> bytes:
        verifier = self._hub.options.verifier
        if self._privileges is not None:
            self._refuse_and_end(message, ErrorCode.ALREADY_AUTHORIZED, "already authorized")
        if verifier is not None:
            try:
                self._privileges = verifier.verify(message.token, self._hub.clock.now_ms() / 1000)
            except UnauthorizedError as error:
                self._refuse_and_end(message, ErrorCode.UNAUTHORIZED, str(error))
            else:
                self._locked_out = False
                self.source = f"worterbuch:{self._privileges.name}"
        return encode_authorized()

    def _authenticate(self, message: m.Authentication) -> bytes:
        secret, verifier = self._hub.options.shared_secret, self._hub.options.verifier
        if secret is not None:
            if verifier is not None and verifier.algorithm != "HS256":  # a public key is no secret
                self._refuse_and_end(message, ErrorCode.AUTHORIZATION_FAILED, "this server needs a JWT")
            if not self._locked_out:
                self._refuse_and_end(message, ErrorCode.ALREADY_AUTHORIZED, "already authenticated")
            if not proves_secret(message.token, self.client_id, secret):
                self._refuse_and_end(message, ErrorCode.AUTHORIZATION_FAILED, "wrong token")
            self._locked_out = False
        return encode_authenticated()

    def _shake_hands(self, message: m.Handshake) -> bytes:
        profile = choose_handshake(message.versions)
        if profile is None:
            versions = ", ".join(f"{major}.{minor}" for major, minor in message.versions)
            raise RefusedError(ErrorCode.PROTOCOL_NEGOTIATION_FAILED, f"none of these versions: {versions}")
        self._finish()  # what was asked before is answered, and told, in the dialect of before
        self._use(profile)
        self._greeted = True
        self._leave_behind(message.grave_goods, message.last_will)
        symbols = self.symbols
        return encode_handshake(profile.version, symbols.separator, symbols.wildcard, symbols.multi_wildcard)

    def _leave_behind(self, goods: Sequence[str], will: Sequence[tuple[str, bytes]]) -> None:
        """Keep what happens when this client is gone; what is wrong or protected in it is left out (section 9.3)."""
        good = [one for one in goods if check_pattern(one) is None and not has_too_many_elements(one)]
        kept = [one for one in will if check_key(one[0]) is None and not has_too_many_elements(one[0])]
        patterns = tuple(map(store_pattern, good))
        entries = tuple((key, msgspec.Raw(value)) for key, value in kept)
        self._state.set_testament(self.client_id, Testament(patterns, entries))

    # -- values ------------------------------------------------------------------------------------------------------

    def _get(self, message: m.Get) -> bytes:
        key = message.key
        self._check_key(key)
        self._need("read", key)
        return encode_state(message.transaction_id, self._state.get(key), self._pair_key(key))

    def _cget(self, message: m.CGet) -> bytes:
        self._check_key(message.key)
        self._need("read", message.key)
        return encode_cstate(message.transaction_id, *self._state.get_version(message.key))

    def _pget(self, message: m.PGet) -> bytes:
        pattern = self._pattern(message.pattern)
        self._need("read", message.pattern)
        return encode_pstate(
            message.transaction_id, self._write_pattern(message.pattern), self.write_pairs(self._state.match(pattern))
        )

    def _pattern(self, text: str) -> KeyPattern:
        self._check_elements(text)
        code = check_pattern(text, historic=self.profile.historic_wildcards)
        if code is not None:
            raise RefusedError(ErrorCode(code), f"'{text}' has # before its end")
        return store_pattern(text)

    def _set(self, message: m.Set) -> bytes:
        key = message.key
        self._check_key(key)
        self._check_writable(key)
        self._need("write", key)
        try:
            self._state.set(key, message.value)
        except VersionedError as error:
            raise RefusedError(ErrorCode.CAS, str(error)) from None
        self._note_own(key)
        return encode_ack(message.transaction_id)

    def _cset(self, message: m.CSet) -> bytes:
        key = message.key
        self._check_key(key)
        self._check_writable(key)
        self._need("write", key)
        try:
            self._state.compare_and_set(key, message.value, message.version)
        except VersionMismatchError as error:
            raise RefusedError(ErrorCode.CAS_VERSION_MISMATCH, str(error)) from None
        self._note_own(key)
        return encode_ack(message.transaction_id)

    def _note_own(self, key: str) -> None:
        """Keep the testament when the client changed it; values of another shape are none (section 9.3)."""
        path = f"{SYS}/clients/{self.client_id}/"
        if key.startswith(path) and key[len(path) :] in ("graveGoods", "lastWill"):
            goods = _read(self._state.find(f"{path}graveGoods"), list[str])
            will = _read(self._state.find(f"{path}lastWill"), list[_Will])
            self._leave_behind(goods or (), [(one.key, bytes(one.value)) for one in will or ()])

    def _publish(self, message: m.Publish) -> bytes:
        key = message.key
        self._check_key(key)
        if is_below_sys(key):
            raise RefusedError(ErrorCode.READ_ONLY_KEY, f"'{key}' is read-only")
        self._need("write", key)
        self._state.note(key, message.value)
        return encode_ack(message.transaction_id)

    def _spub_init(self, message: m.SPubInit) -> bytes:
        self._check_elements(message.key)
        self._check_writable(message.key)
        self._need("write", message.key)
        self._streams[message.transaction_id] = message.key
        return encode_ack(message.transaction_id)

    def _spub(self, message: m.SPub) -> bytes:
        key = self._streams.get(message.transaction_id)
        if key is None:
            raise RefusedError(ErrorCode.NO_PUB_STREAM, f"no stream {message.transaction_id}")
        self._check_key(key)
        self._state.note(key, message.value)
        return encode_ack(message.transaction_id)

    def _delete(self, message: m.Delete) -> bytes:
        key = message.key
        self._check_key(key)
        self._check_writable(key)
        self._need("delete", key)
        value = self._state.delete(key)
        self._note_own(key)
        return encode_state_deleted(message.transaction_id, value, self._pair_key(key))

    def _pdelete(self, message: m.PDelete) -> bytes:
        text = message.pattern
        pattern = self._pattern(text)
        self._check_writable(text)
        self._need("delete", text)
        deleted = self._state.delete_matching(pattern)
        if is_below_sys(text):
            for key, _ in deleted:
                self._note_own(key)
        return encode_pstate_deleted(
            message.transaction_id, self._write_pattern(text), () if message.quiet else self.write_pairs(deleted)
        )

    def _list(self, message: m.Ls) -> bytes:
        self._check_elements(message.parent or "")
        self._need("read", children_pattern(message.parent))
        return encode_ls(message.transaction_id, self._state.children(message.parent))

    def _list_matching(self, message: m.PLs) -> bytes:
        parent = message.parent_pattern
        if parent is None:
            return self._list(m.Ls(message.transaction_id))
        self._check_elements(parent)
        code = check_parent_pattern(parent)
        if code is not None:
            raise RefusedError(ErrorCode(code), f"'{parent}' has #")
        self._need("read", children_pattern(parent))
        return encode_ls(message.transaction_id, self._state.children_matching(store_pattern(parent)))

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def _subscribe(self, message: m.Subscribe) -> bytes:
        key = message.key
        self._check_key(key)
        self._need("read", key)
        receipt, subscriber = self._begin(message, key, is_pattern=False, unique=message.unique)

        def encode() -> bytes:
            value = self._state.find(key)
            return b"" if value is None else encode_state(message.transaction_id, value, self._pair_key(key))

        if not message.live_only:
            self._send_snapshot(receipt, encode)
        self._hub.subscribe(subscriber, exactly(key))
        return b""

    def _psubscribe(self, message: m.PSubscribe) -> bytes:
        text = message.pattern
        pattern = self._pattern(text)
        self._need("read", text)
        receipt, subscriber = self._begin(
            message, text, is_pattern=True, unique=message.unique, aggregate_ms=message.aggregate_ms
        )

        def encode() -> bytes:
            pairs = self.write_pairs(self._state.match(pattern))
            return encode_pstate(message.transaction_id, self._write_pattern(text), pairs)

        if not message.live_only:
            self._send_snapshot(receipt, encode)
        self._hub.subscribe(subscriber, subscription_pattern(text))
        return b""

    def _begin(
        self,
        message: m.Subscribe | m.PSubscribe,
        subject: str,
        *,
        is_pattern: bool,
        unique: bool,
        aggregate_ms: int | None = None,
    ) -> tuple[Receipt, Subscriber]:
        """Answer everything up to a subscription, so that what follows has been seen by its snapshot, or has not.

        Gives also when that is stored.
        """
        transaction_id = message.transaction_id
        self._done.append(message)
        self._replies.append(encode_ack(transaction_id))
        receipt = self._finish()
        before = self.subscribers.pop(transaction_id, None)
        if before is not None:
            self._hub.unsubscribe(before)
        subscriber = self.subscribers[transaction_id] = Subscriber(
            self,
            transaction_id,
            subject,
            pattern=self._write_pattern(subject) if is_pattern else None,
            unique=unique,
            since=self._state.commit_number,
            aggregate_ms=aggregate_ms,
        )
        return receipt, subscriber

    def _unsubscribe(self, message: m.Unsubscribe) -> bytes:
        self._finish()  # what was changed before is still told
        subscriber = self.subscribers.pop(message.transaction_id, None)
        if subscriber is None:
            return self._unsubscribe_ls(m.UnsubscribeLs(message.transaction_id))
        self._hub.unsubscribe(subscriber)
        return encode_ack(message.transaction_id)

    def _subscribe_ls(self, message: m.SubscribeLs) -> bytes:
        parent = message.parent
        self._check_elements(parent or "")
        self._need("read", children_pattern(parent))
        transaction_id = message.transaction_id
        self._done.append(message)
        self._replies.append(encode_ack(transaction_id))
        receipt = self._finish()
        before = self.ls_subscribers.pop(transaction_id, None)
        if before is not None:
            self._hub.unsubscribe_ls(before)
        subscriber = self.ls_subscribers[transaction_id] = Subscriber(
            self, transaction_id, parent, unique=False, since=self._state.commit_number
        )
        self._send_snapshot(receipt, lambda: encode_ls(transaction_id, self._hub.children(parent)))
        self._hub.subscribe_ls(subscriber)
        return b""

    def _unsubscribe_ls(self, message: m.UnsubscribeLs) -> bytes:
        self._finish()
        subscriber = self.ls_subscribers.pop(message.transaction_id, None)
        if subscriber is None:
            raise RefusedError(ErrorCode.NOT_SUBSCRIBED, f"no subscription {message.transaction_id}")
        self._hub.unsubscribe_ls(subscriber)
        return encode_ack(message.transaction_id)

    # -- locks -------------------------------------------------------------------------------------------------------

    def _lock(self, message: m.Lock) -> bytes:
        self._check_key(message.key)
        self._need("write", message.key)
        try:
            if self._state.locks.lock(message.key, self.client_id):
                self._show_lock(message.key)
        except LockHeldError as error:
            raise RefusedError(ErrorCode.KEY_IS_LOCKED, str(error)) from None
        return encode_ack(message.transaction_id)

    def _acquire(self, message: m.AcquireLock) -> bytes:
        self._check_key(message.key)
        self._need("write", message.key)
        if not self._state.locks.acquire(message.key, self.client_id, message.transaction_id):
            return b""
        self._show_lock(message.key)
        return encode_ack(message.transaction_id)

    def _show_lock(self, key: str) -> None:
        if self._hub.options.extended_monitoring:
            self._hub.show(f"locks/{key}", self.client_id)

    def _release(self, message: m.ReleaseLock) -> bytes:
        self._check_key(message.key)
        self._need("write", message.key)
        try:
            granted = self._state.locks.release(message.key, self.client_id)
        except NotLockedError as error:
            raise RefusedError(ErrorCode.KEY_IS_NOT_LOCKED, str(error)) from None
        except LockHeldError as error:
            for wait in error.cancelled:
                self._send(self._error(wait, ErrorCode.LOCK_ACQUISITION_CANCELLED, "given up"))
            raise RefusedError(ErrorCode.KEY_IS_LOCKED, str(error)) from None
        self._hub.grant(granted)
        self._hub.flush()
        return encode_ack(message.transaction_id)

    # -- what no server does -----------------------------------------------------------------------------------------

    def _refuse(self, message: m.Transform) -> bytes:
        self._refuse_and_end(message, ErrorCode.NOT_IMPLEMENTED, "transform was never implemented")
        raise AssertionError

    def _refuse_file(self, message: m.Export | m.Import) -> bytes:
        raise RefusedError(ErrorCode.OTHER, "files on the server are not for clients; use the HTTP export and import")


class _Will(msgspec.Struct, frozen=True):
    key: str
    value: msgspec.Raw


CHANGING = (m.Set, m.CSet, m.Delete, m.PDelete, m.Publish, m.SPub)
READING = (m.Get, m.CGet, m.PGet, m.Ls, m.PLs)


def _read(text: bytes | None, shape: Any) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=shape)
    except msgspec.DecodeError:
        return None
