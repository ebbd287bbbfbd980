"""A client's requests to the tree: values, published values, names, locks (docs/specifications/worterbuch.md, 5)."""

from babelbus.core.access import Action, check_may
from babelbus.core.state import (
    GuardedState,
    LockHeldError,
    NotLockedError,
    State,
    Testament,
    VersionedError,
    VersionMismatchError,
    children_pattern,
)
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.answers import Answers
from babelbus.protocols.worterbuch.codec import encode_ack, encode_cstate, encode_ls, encode_pstate, encode_state
from babelbus.protocols.worterbuch.errors import ErrorCode, RefusedError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.names import SYS, check_writable, is_below_sys
from babelbus.protocols.worterbuch.privileges import Privilege
from babelbus.protocols.worterbuch.testament import read_part
from babelbus.protocols.worterbuch.translator import Translator

KEPT_SETTING = "worterbuch.subscriptions_max"
"""Bounds whatever the server keeps for one client, each kind for itself."""


class TreeRequests:
    """The requests of one client that read or change the tree: each method handles a request and returns the answer.

    Raises:
        RefusedError: the request cannot be done, or the client may not; nothing was changed.
        NoSuchKeyError: the key has no value.
        AccessRefusedError: the table of access does not grant it; nothing was changed.
    """

    def __init__(self, hub: Hub, client_id: str, translator: Translator, access: Access, answers: Answers) -> None:
        self._hub = hub
        self._state = hub.state
        self._client_id = client_id
        self._translator = translator
        self._access = access
        self._answers = answers
        self._kept_max = hub.settings.subscriptions_max
        self._own_bytes_max = hub.settings.message_bytes_max
        self._own: dict[str, int] = {}
        """The keys that the client has set below `$SYS`, where it needs no right, with the bytes of key and value."""
        self._own_bytes = 0
        self.streams: dict[int, str] = {}
        """The key of each transaction id that the client has bound, for `spub`."""

    # -- values ------------------------------------------------------------------------------------------------------

    def get(self, message: m.Get) -> bytes:
        """Return the value of a key."""
        key = message.key
        value = self._readable(key).get(key)
        return encode_state(message.transaction_id, value, self._translator.write_pair_key(key))

    def cget(self, message: m.CGet) -> bytes:
        """Return the value of a key, and its version."""
        key = message.key
        return encode_cstate(message.transaction_id, *self._readable(key).get_version(key))

    def _readable(self, key: str) -> State | GuardedState:
        """Return where the client reads a key."""
        access = self._access
        if self._translator.is_plain(key):
            access.need("read", key)
            return access.state
        self._translator.check_key(key)
        access.need("read", key)
        return access.state_of(key)

    def pget(self, message: m.PGet) -> bytes:
        """Return all values whose keys match."""
        translator, text = self._translator, message.pattern
        pattern = translator.read_pattern(text)
        self._access.need("read", text)
        pairs = translator.write_pairs(self._access.match(pattern))
        return encode_pstate(message.transaction_id, translator.write_pattern(text), pairs)

    def set(self, message: m.Set) -> bytes:
        """Set a key."""
        key = message.key
        state = self._need("write", key)
        size_bytes = self._check_own_room(key, message.value) if key.startswith(SYS) else 0
        testament = self._read_part(key, message.value) if size_bytes else None
        try:
            state.set(key, message.value)
        except VersionedError as error:
            raise RefusedError(ErrorCode.CAS, str(error)) from None
        if size_bytes:
            self._note_own(key, size_bytes)
        self._keep(testament)
        return encode_ack(message.transaction_id)

    def cset(self, message: m.CSet) -> bytes:
        """Set a key if it has the version that the client knows."""
        key = message.key
        state = self._need("write", key)
        size_bytes = self._check_own_room(key, message.value)
        testament = self._read_part(key, message.value)
        try:
            state.compare_and_set(key, message.value, message.version)
        except VersionMismatchError as error:
            raise RefusedError(ErrorCode.CAS_VERSION_MISMATCH, str(error)) from None
        if size_bytes:
            self._note_own(key, size_bytes)
        self._keep(testament)
        return encode_ack(message.transaction_id)

    def _check_own_room(self, key: str, value: bytes) -> int:
        """Check that the client may set a key below `$SYS`, its own; return bytes of key and value, 0 for other keys.

        Raises:
            RefusedError: the client has too many of these keys, or too many bytes in them.
        """
        if not is_below_sys(key):
            return 0
        if key not in self._own and len(self._own) >= self._kept_max:
            text = f"a client sets at most {self._kept_max:,} keys below its own in $SYS ({KEPT_SETTING})"
            raise RefusedError(ErrorCode.OTHER, text)
        size_bytes = len(key.encode()) + len(value)
        if self._own_bytes - self._own.get(key, 0) + size_bytes > self._own_bytes_max:
            text = f"a client has at most {self._own_bytes_max:,} bytes in its own keys of $SYS"
            raise RefusedError(ErrorCode.OTHER, f"{text} (worterbuch.message_bytes_max)")
        return size_bytes

    def _note_own(self, key: str, size_bytes: int) -> None:
        """Record that the client has set one of its own keys, or deleted it (0 bytes)."""
        self._own_bytes += size_bytes - self._own.pop(key, 0)
        if size_bytes:
            self._own[key] = size_bytes

    def _need(self, privilege: Privilege, key: str) -> State | GuardedState:
        """Check that the client may change a key, as far as its token goes; return where it changes the key."""
        access = self._access
        if self._translator.is_plain(key):
            access.need(privilege, key)
            return access.state
        access.check_writable(key)  # first: a wildcard below `$SYS` is read-only too
        self._translator.check_key(key)
        access.need(privilege, key)
        return access.state_of(key)

    def _read_part(self, key: str, value: bytes | None) -> Testament | None:
        """Return the client's testament if it is about to change a part of it."""
        return read_part(self._state, self._access, self._client_id, key, value)

    def _keep(self, testament: Testament | None) -> None:
        if testament is not None:
            self._state.set_testament(self._client_id, testament, self._access.identity.name)

    def delete(self, message: m.Delete) -> bytes:
        """Delete a key, and return the value that it had."""
        key = message.key
        value = self._need("delete", key).delete(key)
        self._note_own(key, 0)
        self._keep(self._read_part(key, None))
        return encode_state(message.transaction_id, value, self._translator.write_pair_key(key), deleted=True)

    def pdelete(self, message: m.PDelete) -> bytes:
        """Delete all keys that match, and return the values that they had."""
        translator, text = self._translator, message.pattern
        pattern = translator.read_pattern(text)
        self._access.check_writable(text)
        self._access.need("delete", text)
        state = self._state if is_below_sys(text) else self._access.state  # there it is the client's own
        deleted = state.delete_matching(pattern)
        for key, _ in deleted if is_below_sys(text) else ():
            self._note_own(key, 0)
            self._keep(self._read_part(key, None))
        pairs = () if message.quiet else translator.write_pairs(deleted)
        return encode_pstate(message.transaction_id, translator.write_pattern(text), pairs, deleted=True)

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, message: m.Publish) -> bytes:
        """Publish a value to the subscribers of a key, and store nothing."""
        key = message.key
        self._translator.check_key(key)
        check_writable(key)
        self._access.need("write", key)
        self._access.state.note(key, message.value)
        return encode_ack(message.transaction_id)

    def spubinit(self, message: m.SPubInit) -> bytes:
        """Keep a key under a transaction id, for `spub`."""
        self._translator.check_size(message.key)
        self._access.check_writable(message.key)
        self._access.need("write", message.key)
        check_may(self._access.identity, Action.PUBLISH, message.key)
        if len(self.streams) >= self._kept_max and message.transaction_id not in self.streams:
            raise RefusedError(ErrorCode.OTHER, f"a client binds at most {self._kept_max:,} keys ({KEPT_SETTING})")
        self.streams[message.transaction_id] = message.key
        return encode_ack(message.transaction_id)

    def spub(self, message: m.SPub) -> bytes:
        """Publish to the key that is bound to a transaction id."""
        key = self.streams.get(message.transaction_id)
        if key is None:
            raise RefusedError(ErrorCode.NO_PUB_STREAM, f"no stream {message.transaction_id}")
        self._translator.check_key(key)
        self._access.state.note(key, message.value)
        return encode_ack(message.transaction_id)

    # -- names -------------------------------------------------------------------------------------------------------

    def ls(self, message: m.Ls) -> bytes:
        """Return the names below a key."""
        self._translator.check_size(message.parent)
        self._access.need("read", children_pattern(message.parent))
        return encode_ls(message.transaction_id, self._access.state.children(message.parent))

    def pls(self, message: m.PLs) -> bytes:
        """Return the names below all keys that match."""
        parent = message.parent_pattern
        if parent is None:
            return self.ls(m.Ls(message.transaction_id))
        pattern = self._translator.read_parent_pattern(parent)
        self._access.need("read", children_pattern(parent))
        return encode_ls(message.transaction_id, self._access.state.children_matching(pattern))

    # -- locks -------------------------------------------------------------------------------------------------------

    def lock(self, message: m.Lock) -> bytes:
        """Lock a key, if nobody has."""
        self._need_lock(message.key)
        self._need_room(message.key)
        try:
            self._access.state.locks.lock(message.key, self._client_id)
        except LockHeldError as error:
            raise RefusedError(ErrorCode.KEY_IS_LOCKED, str(error)) from None
        return encode_ack(message.transaction_id)

    def acquirelock(self, message: m.AcquireLock) -> bytes:
        """Lock a key, or wait for it: then `send_granted` answers."""
        self._need_lock(message.key)
        self._need_room(message.key)
        granted = self._access.state.locks.acquire(message.key, self._client_id, message.transaction_id)
        return encode_ack(message.transaction_id) if granted else b""

    def releaselock(self, message: m.ReleaseLock) -> bytes:
        """Release a lock, or end the wait for it."""
        self._need_lock(message.key)
        try:
            self._access.state.locks.release(message.key, self._client_id)
        except NotLockedError as error:
            raise RefusedError(ErrorCode.KEY_IS_NOT_LOCKED, str(error)) from None
        except LockHeldError as error:
            code = ErrorCode.LOCK_ACQUISITION_CANCELLED
            for wait in error.cancelled:
                self._answers.send(self._translator.encode_error(wait, code, "given up"))
            raise RefusedError(ErrorCode.KEY_IS_LOCKED, str(error)) from None
        self._hub.flush()
        return encode_ack(message.transaction_id)

    def _need_room(self, key: str) -> None:
        if not self._state.locks.has_room(self._client_id, key, self._kept_max):
            text = f"a client holds or awaits at most {self._kept_max:,} locks ({KEPT_SETTING}); release some first"
            raise RefusedError(ErrorCode.OTHER, text)

    def _need_lock(self, key: str) -> None:
        self._translator.check_key(key)
        self._access.need("write", key)
