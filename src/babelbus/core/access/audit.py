"""The audit: logins, refusals and changes, as JSON records of the reserved topic `$audit`.

Refusals that are alike (principal, action, subject) within one second are one record with a count, and so are logins
(principal, source); behind the first ones of a principal, all others of that second are one record. So whoever tries in
a loop neither fills the disk nor hides what others do. No secret and no payload is ever recorded.
"""

import asyncio
import base64
import logging
import secrets
from collections.abc import Callable
from typing import Any, Final

import msgspec

from babelbus.clock import Clock
from babelbus.core.access.model import SERVER, Action, Identity
from babelbus.core.publish import Publication, Publish
from babelbus.core.receipt import Promise
from babelbus.core.record import Event
from babelbus.core.topic import Topic
from babelbus.core.work import Work
from babelbus.records.envelope import CONTENT_TYPE, JSON_TYPE

log = logging.getLogger(__name__)

AUDIT_TOPIC: Final = "$audit"
PROTOCOL: Final = "audit"
FOLD_SECONDS = 1.0
FOLDED_MAX = 1024
"""Most different records of one second; further ones are counted in one record."""
PRINCIPAL_FOLDED_MAX = 64
"""The same for one principal."""
TOO_MANY: Final = "too many to record each"
SUBJECT_LENGTH_MAX = 256
_ID_BYTES = 5
OpenTopic = Callable[[], Work[Topic]]


class AuditRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record. `kind` is `refusal`, `login`, `login-refused`, `logout`, `close`, `move` or `change`."""

    kind: str
    time_ms: int
    principal: str
    source: str = ""
    action: str = ""
    subject: str = ""
    count: int = 1
    id: str = ""
    reason: str = ""
    version: int = 0
    before: list[Any] = []
    after: list[Any] = []


class Audit:
    """Collects records and publishes them. `open_topic` makes the topic when the first record comes."""

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop, publish: Publish, open_topic: OpenTopic) -> None:
        self._clock = clock
        self._loop = loop
        self._publish = publish
        self._open_topic = open_topic
        self._folded: dict[tuple[str, str, str, str], AuditRecord] = {}
        self._counts: dict[tuple[str, str], int] = {}
        """Records of each kind and principal among them."""
        self._timer: asyncio.TimerHandle | None = None
        self.on_refused: Callable[[Action], None] = lambda action: None
        self.on_changed: Callable[[Identity, int, list[Any], list[Any]], None] = lambda by, version, before, after: None
        """Called with each change of the table: by whom, the version, and the entries before and after."""
        self.unwritten = 0
        """Number of records that the disk refused."""

    def refused(self, principal: Identity, action: Action, subject: str) -> str:
        """Record a refusal; return its id, which the error carries."""
        self.on_refused(action)
        return self._fold("refusal", principal.name, principal.source, action.value, subject)

    def login(self, name: str, source: str, *, refused: str = "") -> str:
        """Record a login, or why it was refused; return the id of the record."""
        return self._fold("login-refused" if refused else "login", name, source, "", "", refused)

    def logout(self, name: str, source: str) -> None:
        """Record that a client has logged out."""
        self._fold("logout", name, source, "", "")

    def closed(self, by: Identity, connection: str) -> None:
        """Record that somebody has closed the connection of a client."""
        self._fold("close", by.name, by.source, "", connection)

    def moved(self, by: Identity, member: str) -> None:
        """Record that somebody has given the data of the cluster to another member."""
        self._fold("move", by.name, by.source, "", member)

    def changed(self, by: Identity, version: int, before: list[Any], after: list[Any]) -> None:
        """Record a change of the table, with the entries before and after it."""
        now = self._clock.now_ms()
        self.on_changed(by, version, before, after)
        self._write([AuditRecord("change", now, by.name, by.source, version=version, before=before, after=after)])

    def listed(self, by: Identity, before: object, after: object) -> None:
        """Record a change of the list of jebp clients, with the client before and after it: they are principals."""
        now = self._clock.now_ms()
        self._write([AuditRecord("change", now, by.name, by.source, before=[before], after=[after])])

    def _fold(self, kind: str, name: str, source: str, action: str, subject: str, reason: str = "") -> str:
        subject = subject[:SUBJECT_LENGTH_MAX]
        name = name[:SUBJECT_LENGTH_MAX]
        place = (kind, name, action, subject or source)
        record = self._folded.get(place)
        if record is None and self._counts.get((kind, name), 0) >= PRINCIPAL_FOLDED_MAX:
            place, action, subject, reason = (kind, name, "", ""), "", "", TOO_MANY
            record = self._folded.get(place)
        if record is None and len(self._folded) >= FOLDED_MAX:
            place, name, source, action, subject, reason = (kind, "", "", ""), "", "", "", "", TOO_MANY
            record = self._folded.get(place)
        if record is None:
            self._counts[kind, name] = self._counts.get((kind, name), 0) + 1
            id_ = base64.b32encode(secrets.token_bytes(_ID_BYTES)).decode().lower()
            now = self._clock.now_ms()
            record = AuditRecord(kind, now, name, source, action, subject, 0, id_, reason)
            if self._timer is None:
                self._timer = self._loop.call_later(FOLD_SECONDS, self.flush)
        self._folded[place] = msgspec.structs.replace(record, count=record.count + 1)
        return record.id

    def flush(self) -> Promise | None:
        """Publish what was folded; return what is done when it is as durable as the topic says."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._folded, self._counts = list(self._folded.values()), {}, {}
        return self._write(records) if records else None

    def _write(self, records: list[AuditRecord]) -> Promise:
        done = Promise()

        def publish(opened: Work[Topic]) -> None:
            if opened.error is not None:
                self._fail(len(records), opened.error)
                done.resolve(opened.error)
                return
            headers = ((CONTENT_TYPE, JSON_TYPE),)
            events = [Event(AUDIT_TOPIC, msgspec.json.encode(one), None, headers, one.time_ms) for one in records]
            receipt = self._publish(Publication(SERVER, PROTOCOL, events, AUDIT_TOPIC))
            receipt.when_done(written)

        def written(receipt: Promise) -> None:
            if receipt.error is not None:
                self._fail(len(records), receipt.error)
            done.resolve(receipt.error)

        self._open_topic().when_done(publish)
        return done

    def _fail(self, count: int, error: Exception) -> None:
        self.unwritten += count
        log.error("audit: %d records are not written: %s", count, error)

    async def close(self) -> None:
        """Publish what was folded."""
        last = self.flush()
        if last is not None:
            await last.wait()
