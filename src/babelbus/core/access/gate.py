"""The gate: the table of access kept in the compacted topic `$access`, its mode, and who is told of a change.

record := key (the id of an entry), payload (JSON; a tombstone when the entry is removed). A change is one append that
ends with the record `["version"]`: entries behind the last such record are of a change that a crash cut short, and do
not count. A change is made once its records are durable. A note beside the topics, written behind that, says which
version the table has had: a topic that somebody emptied, or set back, must not turn the gate off.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol

import msgspec

from babelbus.clock import Clock
from babelbus.core.access.audit import AUDIT_TOPIC, Audit
from babelbus.core.access.model import ANONYMOUS, SERVER, Action, Identity, InvalidAccessError, Principal, Row
from babelbus.core.access.rights import ADMIN_ROWS, CLIENT_ROWS, NOBODY, Rights, RowSet, name_of_owner, owner_of
from babelbus.core.access.table import MODE_ID, Edit, Entry, Mode, Table, edits_for, id_of
from babelbus.core.access.table_file import FILE_ID, FileIds, read_table_file
from babelbus.core.publish import Publication
from babelbus.core.receipt import Receipt
from babelbus.core.settings import TopicSettings
from babelbus.core.topic import Topic
from babelbus.core.work import Work, Writer
from babelbus.errors import BabelbusError, StorageError
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import CorruptRecordError, encode_batch
from babelbus.records.record import Record
from babelbus.storage.errors import AlteredError
from babelbus.storage.notes import COPY_BACK, FORMAT, Note

log = logging.getLogger(__name__)

ACCESS_TOPIC: Final = "$access"
PROTOCOL: Final = "access"
VERSION_ID = '["version"]'
UNKNOWN_PREFIX: Final = "unknown#"
"""Begins the names in the audit of clients whose name no principal has; no principal may be called so."""
READ_BYTES = 2**20
EXPIRE_SECONDS = 1.0
"""How late a session may end whose credential has expired."""
NOTE_NAME: Final = "access.json"
NOTE_ADVICE = f"{COPY_BACK}, or remove it: then nobody knows whether the table is whole"
ADVICE = "restore the topic, or remove it from the disk and set access.accept_version = 0: then the table is empty"


class AccessConflictError(BabelbusError):
    """The table has changed since the version that a change was made for."""

    def __init__(self, wanted: int, found: int) -> None:
        super().__init__(
            f"the table has version {found}, the change was made for version {wanted}: somebody else has changed it; "
            "look at it again, then change it"
        )
        self.wanted, self.found = wanted, found


class LockOutError(BabelbusError):
    """A change would take from its author the right to change the table."""

    def __init__(self) -> None:
        super().__init__(
            f"this takes your own right to administer access away (admin on {ACCESS_TOPIC}): another administrator can "
            "do it, or the token of the data folder"
        )


class _Version(msgspec.Struct, frozen=True):
    """The record that ends a change."""

    version: int
    by: str
    time_ms: int


class NotedVersion(msgspec.Struct, frozen=True):
    """The note of the version that the table has."""

    version: int = 0
    format: int = FORMAT


class Door(Protocol):
    """The part of the broker that the gate uses."""

    def find_topic(self, name: str) -> Topic | None:
        """Return a topic, `None` if the name is free or the topic's settings are damaged."""

    @property
    def damaged_topics(self) -> Mapping[str, StorageError]:
        """Why topics are not open whose names stay taken."""

    def open_reserved(self, name: str, settings: TopicSettings) -> Topic:
        """Return a topic of the server's own, with these settings. Blocks."""

    def ensure_reserved(self, name: str, settings: TopicSettings) -> Work[Topic]:
        """Return a topic of the server's own; create the topic if the name is free."""

    def publish(self, publication: Publication) -> Receipt:
        """Publish; whatever prevents it is the error of the receipt."""

    def writer(self, what: str, prepare: Callable[[], Callable[[], None]]) -> Writer:
        """Return a writer of one small file, whose content `what` names."""


class Gate:
    """One gate for all protocols. All calls come from the event loop; call `open` before the first one.

    `mode` is what the configuration says; the table can turn the gate on as well. While the gate is off, identities
    have no rights that are asked for (`Identity.rights` is `None`).
    """

    def __init__(
        self,
        door: Door,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        note: Note[NotedVersion],
        *,
        settings: TopicSettings,
        audit_settings: TopicSettings,
        mode: Literal["off", "enforce"] = "off",
        accept_version: int | None = None,
    ) -> None:
        self.table = Table()
        self.mode = mode
        self.on_changed: list[Callable[[], None]] = []
        """Called behind each change of the table or of the mode."""
        self.audit = Audit(clock, loop, door.publish, lambda: door.ensure_reserved(AUDIT_TOPIC, audit_settings))
        self.table.on_refused = self.audit.refused
        self.client_rights = Rights("client", [RowSet(CLIENT_ROWS)], self.audit.refused)
        """The rights of a client in the lists of jebp, while the gate is off."""
        self.admin_rights = Rights("admin", [RowSet(ADMIN_ROWS)], self.audit.refused)
        self._door = door
        self._clock = clock
        self._loop = loop
        self._settings = settings
        self._changing = asyncio.Lock()
        self._expires_ms = math.inf
        """When the next credential of the table expires."""
        self._asked_ms = 0
        self._timer: asyncio.TimerHandle | None = None
        self._name_key = secrets.token_bytes(32)
        self._cut_short: dict[str, bytes | None] = {}
        """The entries of a change that a crash or the disk cut short, with what they were before."""
        self._note = note
        self._noted_version = 0
        self._version_to_note = 0
        self._writer = door.writer(
            "the version of the table of access", lambda: partial(note.write, NotedVersion(self._version_to_note))
        )
        self._accept_version = accept_version

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def enforcing(self) -> bool:
        """Whether rights are asked for."""
        return self.mode == "enforce" or self.table.enforced

    def identity(self, source: str, name: str) -> Identity:
        """Return the identity of a principal that has proved who it is; a name without a principal has no rights."""
        if not self.enforcing:
            return Identity(source, name, None)
        return Identity(source, name, self.table.rights(name), self.table.root(name))

    def note_login(self, name: str, source: str, *, refused: str = "", is_known: bool = False) -> str:
        """Record in the audit that a client has proved a name, or why it has not; return the id of the record.

        Nothing is recorded while the gate is off: then most clients prove nothing. A refused name that no principal
        has may be a password in the wrong field, and is recorded as a keyed hash unless `is_known`.
        """
        if not self.enforcing:
            return ""
        if refused and name and not is_known and self.table.principal(name) is None:
            digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._name_key, digest_size=4)
            name = f"{UNKNOWN_PREFIX}{digest.hexdigest()}"
        return self.audit.login(name, source, refused=refused)

    def note_logout(self, name: str, source: str) -> None:
        """Record in the audit that a client has logged out, if the gate is on."""
        if self.enforcing:
            self.audit.logout(name, source)

    def note_close(self, by: Identity, connection: str) -> None:
        """Record in the audit that somebody has closed the connection of a client, if the gate is on."""
        if self.enforcing:
            self.audit.closed(by, connection)

    def owner(self, source: str, owner: str) -> Identity:
        """Return the identity of who is kept as an owner, see `owner_of`; strangers, if nobody is.

        If the principal was removed, it may do nothing, also if another one has its name now.
        """
        identity = self.identity(source, name_of_owner(owner) or ANONYMOUS)
        if owner and identity.rights is not None and owner_of(identity) != owner:
            return Identity(source, identity.name, NOBODY.rights)
        return identity

    def anonymous(self, source: str) -> Identity:
        """Return the identity of a client that proves nothing."""
        return self.identity(source, ANONYMOUS)

    def open(self) -> None:
        """Read the table. Blocks: nobody is served yet.

        Raises:
            StorageError: the table cannot be read whole, or lacks changes that it had.
        """
        topic = self._door.find_topic(ACCESS_TOPIC)
        if topic is None and ACCESS_TOPIC in self._door.damaged_topics:
            topic = self._door.open_reserved(ACCESS_TOPIC, self._settings)  # an empty table would turn the gate off
        if topic is not None:
            self._load(topic)
        self._check_version()
        self._find_next_expiry()

    def _load(self, topic: Topic) -> None:
        try:
            whole, last = self._read(topic)
            edits = [(id_, _decode(id_, content)) for id_, content in whole.items()]
        except (CorruptRecordError, msgspec.DecodeError, InvalidAccessError) as error:
            raise StorageError(f"topic {ACCESS_TOPIC!r}, the table of access, is damaged: {error}; {ADVICE}") from error
        self.table.apply(edits)
        self.table.version = 0 if last is None else last.version

    def _check_version(self) -> None:
        """Check that the table lacks no change that was acknowledged.

        Raises:
            AlteredError: it does, and nobody has accepted this version.
        """
        version, accepted = self.table.version, self._accept_version
        self._noted_version = (self._note.read() or NotedVersion()).version
        if self._noted_version <= version:
            if accepted is not None:
                log.warning("access.accept_version = %d is not needed any more: remove it", accepted)
        elif accepted == version:
            log.warning("access: the table lacks changes, version %d of %d is accepted", version, self._noted_version)
        else:
            raise AlteredError(
                f"topic {ACCESS_TOPIC!r}, the table of access, has version {version} and had version"
                f" {self._noted_version}: somebody removed changes of it. Restore the topic (in a cluster its stream), "
                f"or accept the loss with access.accept_version = {version} for one start, and make the changes again; "
                "start again"
            )

    def _read(self, topic: Topic) -> tuple[dict[str, bytes], _Version | None]:
        """Return the entries up to the last whole change, and the record that ends it."""
        partition_log = topic.partition(0).log
        whole: dict[str, bytes] = {}
        change: dict[str, bytes | None] = {}
        last = None
        offset, end = partition_log.first_offset, partition_log.next_offset
        while offset < end:
            chunk = partition_log.read(offset, READ_BYTES, end)
            for record in iterate(decode_chunk(chunk.data, verified=True)) if chunk.data else ():
                id_ = (record.key or b"").decode()
                if id_ != VERSION_ID:
                    change[id_] = record.payload
                    continue
                for key, content in change.items():
                    if content is None:
                        whole.pop(key, None)
                    else:
                        whole[key] = content
                change = {}
                last = msgspec.json.decode(record.payload or b"", type=_Version)
            offset = chunk.next_offset
        self._cut_short = {id_: whole.get(id_) for id_ in change}
        return whole, last

    async def settle(self) -> None:
        """Remove a change that a crash cut short; note the version that the table has.

        Raises:
            StorageError: the disk refused.
        """
        if self._cut_short:
            log.warning("access: a change that a crash cut short is taken back")
            await self._append({}, SERVER)
        if self._noted_version != self.table.version:
            await self._note_version()

    async def _note_version(self) -> None:
        """Write the version of the table into the data folder; a full disk prevents neither a start nor a change."""
        self._version_to_note = self.table.version
        try:
            await self._writer.write().wait()
        except StorageError as error:
            log.warning("access: the version of the table is noted with its next change, or the next start: %s", error)

    # -- changing ----------------------------------------------------------------------------------------------------

    async def change(self, edits: Sequence[Edit], by: Identity, *, version: int | None = None) -> int:
        """Update entries of the table, all or none, durably; return the new version.

        `version` is the version that the change was made for; with `None` the change is made whatever came before.

        Raises:
            AccessConflictError: the table has another version.
            InvalidAccessError: an entry is not valid; nothing was changed.
            LockOutError: its author could not change the table any more; nothing was changed.
            StorageError: the disk refused; nothing was changed.
        """
        async with self._changing:
            if version is not None and version != self.table.version:
                raise AccessConflictError(version, self.table.version)
            entries = self.table.entries
            edits = [(id_, self._with_id(id_, entry)) for id_, entry in edits]
            edits = [(id_, entry) for id_, entry in edits if entries.get(id_) != entry]
            self.table.check(edits)
            if not edits:
                return self.table.version
            self._check_lock_out(edits, by)
            shown = [(entries.get(id_), entry) for id_, entry in edits if id_ != FILE_ID]
            try:
                await self._append({id_: None if entry is None else _encode(entry) for id_, entry in edits}, by)
            except StorageError:
                await self._take_back()
                raise
            self.table.apply(edits)
            before, after = (_shown([pair[side] for pair in shown]) for side in (0, 1))
            self.audit.changed(by, self.table.version, before, after)
            self._tell()
            made = self.table.version
            await self._note_version()
            return made

    async def _take_back(self) -> None:
        """Append again what the entries were before a refused change, which a failed flush may have left there."""
        if not self._cut_short:
            return
        try:
            await self._append({}, SERVER)
        except StorageError as error:
            log.warning(
                "access: a refused change is taken back with the next change, or when the server stops: %s", error
            )

    def _check_lock_out(self, edits: Sequence[Edit], by: Identity) -> None:
        """Check that the author of a change keeps the right to change the table, and a credential if it has any.

        Raises:
            LockOutError: it does not.
        """
        known = self.table.principal(by.name)
        if by.rights is None or known is None or not self.table.rights(by.name).may(Action.ADMIN, ACCESS_TOPIC):
            return
        if not self.table.rights_after(edits, by.name).may(Action.ADMIN, ACCESS_TOPIC):
            raise LockOutError
        after = dict(edits).get(id_of(known), known)
        if isinstance(after, Principal) and known.credentials and not after.credentials:
            raise LockOutError

    def _with_id(self, id_: str, entry: Entry | None) -> Entry | None:
        """Return an entry; a principal keeps the id that it has, a new one gets a new id."""
        if not isinstance(entry, Principal):
            return entry
        known = self.table.entries.get(id_)
        return msgspec.structs.replace(entry, id=known.id if isinstance(known, Principal) else secrets.token_hex(8))

    async def put(self, entries: Sequence[Entry], by: Identity, *, version: int | None = None) -> int:
        """Add entries, or replace those with the same ids; see `change`."""
        return await self.change(edits_for(entries), by, version=version)

    async def remove(self, entries: Sequence[Entry], by: Identity, *, version: int | None = None) -> int:
        """Remove entries; see `change`."""
        return await self.change(edits_for((), entries), by, version=version)

    async def enable(self, by: Identity, *, enforce: bool = True) -> int:
        """Set the gate on in the table, or off again; see `change`."""
        return await self.change([(MODE_ID, Mode(enforce) if enforce else None)], by)

    async def apply_file(self, text: str, path: str, by: Identity, *, version: int | None = None) -> int:
        """Replace what the last table file brought by the content of this one; see `change`.

        Raises:
            TableFileError: the file is not valid; the message has line and column, and nothing was changed.
        """
        wanted = {id_of(entry): entry for entry in read_table_file(text, path)}
        for id_, entry in wanted.items():
            known = self.table.entries.get(id_)
            if isinstance(entry, Principal) and isinstance(known, Principal) and not entry.credentials:
                wanted[id_] = msgspec.structs.replace(entry, credentials=known.credentials)
        old = self.table.entries.get(FILE_ID)
        gone = set(old.ids) - wanted.keys() if isinstance(old, FileIds) else set()
        edits: list[Edit] = [(id_, None) for id_ in sorted(gone)]
        edits += [*wanted.items(), (FILE_ID, FileIds(tuple(sorted(wanted))))]
        return await self.change(edits, by, version=version)

    def import_entries(self, origin: str, entries: Sequence[Entry]) -> None:
        """Replace the entries that come from files of the data folder; the topic does not keep them."""
        self.table.import_entries(origin, entries)
        self._tell()

    async def _append(self, contents: dict[str, bytes | None], by: Identity) -> None:
        """Append a change, and take back a change that was cut short before.

        Raises:
            StorageError: the disk refused.
        """
        topic = await self._door.ensure_reserved(ACCESS_TOPIC, self._settings)
        now = topic.stamp()
        version = _Version(self.table.version + 1, by.name, now)
        all_contents = {**self._cut_short, **contents, VERSION_ID: msgspec.json.encode(version)}
        records = [Record(content, id_.encode(), (), now) for id_, content in all_contents.items()]
        partition = topic.partition(0)
        topic.flush()
        batch = encode_batch(records, partition.next_offset)
        receipt = self._door.publish(Publication(SERVER, PROTOCOL, batch, ACCESS_TOPIC, partition=0, at_once=True))
        if receipt.error is not None:  # nothing was appended
            raise receipt.error
        # Until the disk has answered, nobody knows what is there: the next change would write these entries again.
        entries = self.table.entries
        doubtful = {id_: _encode_or_none(entries.get(id_)) for id_ in contents}
        try:
            await receipt.wait()
        except BaseException:
            self._cut_short |= doubtful
            raise
        self._cut_short = {}
        self.table.version = version.version  # in one turn with the entries: a change of both sees neither or both

    def watch(self) -> None:
        """Call `expire` every second from now on."""
        self._timer = self._loop.call_later(EXPIRE_SECONDS, self.watch)
        self.expire()

    def expire(self) -> None:
        """End sessions whose credential has expired since the last call: listeners are called as for a change."""
        now = self._clock.now_ms()
        if now >= self._expires_ms:
            self._tell()
        elif now < self._asked_ms:  # the clock was set back: what had expired is valid again
            self._find_next_expiry()
        self._asked_ms = now

    def _find_next_expiry(self) -> None:
        now = self._clock.now_ms()
        principals = self.table.principals()
        ends = [one.ends_ms for principal, _ in principals for one in principal.credentials if one.is_valid(now)]
        self._expires_ms = min(ends, default=math.inf)

    def _tell(self) -> None:
        self._find_next_expiry()
        for listener in self.on_changed:
            listener()
        self.table.forget_losses()

    async def close(self) -> None:
        """Write what the audit has folded, and take back a refused change."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._changing.locked():
            await self._take_back()
        with contextlib.suppress(BabelbusError):
            await self.audit.close()


def _encode(entry: Entry) -> bytes:
    return msgspec.json.encode(entry)


def _encode_or_none(entry: Entry | None) -> bytes | None:
    return None if entry is None else _encode(entry)


_TYPES: dict[str, Any] = {"row": Row, "principal": Principal, "mode": Mode, "file": FileIds}


def _decode(id_: str, content: bytes) -> Entry:
    """Return a kept entry. Raises: msgspec.DecodeError, InvalidAccessError."""
    kind = msgspec.json.decode(id_.encode(), type=list[str])[0]
    if kind not in _TYPES:
        raise InvalidAccessError(f"an entry of the kind {kind!r} is of a later version")
    entry: Entry = msgspec.json.decode(content, type=_TYPES[kind])
    return entry


def _shown(entries: Sequence[Entry | None]) -> list[Any]:
    """Return entries for the audit, without what belongs to credentials."""
    shown: list[Any] = []
    for entry in entries:
        if isinstance(entry, Principal):
            bare = tuple(msgspec.structs.replace(one, data={}) for one in entry.credentials)
            shown.append(msgspec.to_builtins(msgspec.structs.replace(entry, credentials=bare)))
        else:
            shown.append(None if entry is None else msgspec.to_builtins(entry))
    return shown
