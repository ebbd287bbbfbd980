"""The sessions of the console: the browsers in which somebody has logged in, kept in a note over a restart.

A browser keeps the id of its session in a cookie, 256 random bits; the server keeps the SHA-256 of the id. A session
belongs to a principal with the credentials that it had: when one of the credentials changes, when the principal goes
or gets another root, and when the gate is turned on or off, the session ends. So the thief of a session has no more
than its owner, and loses it with the owner.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable

import msgspec

from babelbus.clock import Clock
from babelbus.config import AdminSettings
from babelbus.core.access import Identity
from babelbus.core.access.gate import Gate
from babelbus.core.access.table import LISTED
from babelbus.core.receipt import DONE, Promise
from babelbus.core.work import Writer
from babelbus.storage.notes import Note
from babelbus.web.errors import SessionsClosedError

log = logging.getLogger(__name__)

NOTE_NAME = "console_sessions"
"""The file below `<data>/conf`."""
ID_BYTES = 32
CODE_BYTES = 16
CODE_SECONDS = 60.0
CODES_MAX = 100
"""Most codes that wait to be used; the oldest goes first."""
CODES_PER_PRINCIPAL_MAX = 10
"""The same for one principal, so that nobody makes the codes of others void."""
WATCH_SECONDS = 1.0
"""How late a session may end whose time is over."""
WRITE_USES_SECONDS = 300.0
"""How old the times of the last requests in the note may be: a restart counts idle time from there."""


class Session(msgspec.Struct, forbid_unknown_fields=True, eq=False):
    """One browser that is logged in. All times are milliseconds since 1970."""

    key: str
    """SHA-256 of the id, in hex."""
    name: str | None
    """The principal; `None` is the built-in administrator."""
    bond: str
    """SHA-256 of what the session belongs to; see `Sessions.bond`."""
    made_ms: int
    used_ms: int
    """When the last request began or ended."""
    ends_ms: int
    """When the session ends at the latest."""

    def __repr__(self) -> str:
        return f"Session({self.name!r})"


class KeptSessions(msgspec.Struct, frozen=True):
    """The content of the note."""

    format: int
    sessions: list[Session]


class _Code(msgspec.Struct, frozen=True):
    """A code that logs in once."""

    name: str | None
    bond: str
    until: float
    """Time of the monotonic clock."""
    ends_ms: float
    """When the credentials end."""


class Sessions:
    """All sessions and codes of a server; only the event loop uses it. Nobody has a session until `begin`."""

    def __init__(
        self,
        gate: Gate,
        clock: Clock,
        settings: AdminSettings,
        make_writer: Callable[[str, Callable[[], Callable[[], None]]], Writer],
        note: Note[KeptSessions] | None,
    ) -> None:
        self._gate = gate
        self._clock = clock
        self._settings = settings
        self._note = note
        self._writer = make_writer("the log-ins at the console", self._prepare)
        self._token_digest = ""
        self._sessions: dict[str, Session] = {}
        """By key; those that were used last are the last."""
        self._codes: dict[str, _Code] = {}
        self._next_ms = 0.0
        """No session ends before this time."""
        self._written_ms = 0
        self._loading: asyncio.Future[KeptSessions | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.on_ended: Callable[[Session], None] = lambda session: None
        """Called with each session that has ended."""
        self.is_running: Callable[[Session], bool] = lambda session: False
        """Returns whether a request of a session is under way: such a session is not idle."""

    def __len__(self) -> int:
        return len(self._sessions)

    # -- life --------------------------------------------------------------------------------------------------------

    def begin(self, token: str) -> None:
        """Begin to read the note. The sessions of the built-in administrator belong to the token."""
        self._token_digest = hashlib.sha256(token.encode()).hexdigest()
        loop = asyncio.get_running_loop()
        # A disk that hangs must not hold up the answers that need no session.
        self._loading = None if self._note is None else loop.run_in_executor(None, self._note.recall)
        self._watch(loop)

    def close(self) -> None:
        """Stop the timer; the sessions stay in the note."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(WATCH_SECONDS, self._watch, loop)
        self.expire()

    async def load(self) -> None:
        """Wait until the note is read; sessions that hold no more are not taken from it."""
        loading = self._loading
        if loading is None:
            return
        kept = await asyncio.shield(loading)
        if self._loading is not loading:  # another request was first
            return
        self._loading = None
        bonds: dict[str | None, str] = {}
        for session in [] if kept is None else kept.sessions:
            if self._holds(session, bonds, self._clock.now_ms()):
                self._sessions.setdefault(session.key, session)
        self._next_ms = 0.0

    # -- log-in ------------------------------------------------------------------------------------------------------

    def open(self, name: str | None, ends_ms: float) -> tuple[str, Session]:
        """Return the id of a new session, and the session; `ends_ms` is when the credential of the log-in expires.

        The note is read (`load`). A principal with too many sessions loses the session that was not used for the
        longest time, and so does the server.
        """
        assert self._loading is None
        now_ms, settings = self._clock.now_ms(), self._settings
        own = [session for session in self._sessions.values() if session.name == name]
        if len(own) >= settings.sessions_per_principal_max:
            self._end(own[0])
        while len(self._sessions) >= settings.sessions_max:
            self._end(next(iter(self._sessions.values())))
        id_ = secrets.token_urlsafe(ID_BYTES)
        last_ms = int(min(now_ms + settings.session_seconds * 1000, ends_ms))
        session = Session(_digest(id_), name, self.bond(name), now_ms, now_ms, last_ms)
        self._sessions[session.key] = session
        self._next_ms = min(self._next_ms, self._end_of(session))
        self._write()
        return id_, session

    def make_code(self, principal: Identity, built_in: Identity) -> tuple[str, int]:
        """Return a code that logs in as a principal once, and when the code expires.

        Raises:
            SessionsClosedError: the principal cannot log in at this server.
        """
        name = self._name_of(principal, built_in)
        if not self._token_digest:
            raise SessionsClosedError("nobody can log in: admin.enabled or admin.console is false")
        self._drop_codes()
        code = secrets.token_urlsafe(CODE_BYTES)
        own = [key for key, kept in self._codes.items() if kept.name == name]
        for key in own[: max(len(own) - CODES_PER_PRINCIPAL_MAX + 1, 0)]:
            del self._codes[key]
        while len(self._codes) >= CODES_MAX:
            del self._codes[next(iter(self._codes))]
        until = self._clock.monotonic() + CODE_SECONDS
        self._codes[_digest(code)] = _Code(name, self.bond(name), until, self._credentials_end(name))
        return code, self._clock.now_ms() + int(CODE_SECONDS * 1000)

    def use_code(self, code: str) -> tuple[str | None, float] | None:
        """Return the principal of a code, which is used up, and when its credentials end; `None` for a wrong code."""
        self._drop_codes()
        kept = self._codes.pop(_digest(code), None)
        if kept is None or kept.bond != self.bond(kept.name):
            return None
        return kept.name, kept.ends_ms

    def _drop_codes(self) -> None:
        now = self._clock.monotonic()
        for key in [key for key, code in self._codes.items() if code.until <= now]:
            del self._codes[key]

    def _name_of(self, principal: Identity, built_in: Identity) -> str | None:
        """Return the name of a principal in the table, `None` for the built-in administrator.

        Raises:
            SessionsClosedError: the principal is another one than that of its name in the table, or has none.
        """
        if principal.rights is None and principal.source == built_in.source:
            return None
        table, name = self._gate.table, principal.name
        if principal.rights is None or table.principal(name) is None:
            raise SessionsClosedError(f"the client {name!r} is no principal, so it cannot log in at the console")
        # While the gate is off, a client of the lists may have the name of another principal of the table.
        own = self._gate.enforcing or principal.source == f"{built_in.source}:{name}"
        if not own and principal.rights not in (self._gate.admin_rights, self._gate.client_rights):
            raise SessionsClosedError(f"the client {name!r} cannot log in at the console while the gate is off")
        if not own and table.origin(name) != LISTED:
            raise SessionsClosedError(f"the client {name!r} has the name of another principal")
        return name

    def _credentials_end(self, name: str | None) -> float:
        """Return when the first credential of a principal expires: nobody says which of them asked for a code."""
        principal = None if name is None else self._gate.table.principal(name)
        now_ms = self._clock.now_ms()
        valid = [] if principal is None else [one for one in principal.credentials if one.is_valid(now_ms)]
        return min((one.ends_ms for one in valid), default=float("inf"))

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def find(self, id_: str) -> Session | None:
        """Return the session with an id, if it holds."""
        await self.load()
        session = self._sessions.get(_digest(id_))
        if session is not None and not self._holds(session, {}, self._clock.now_ms()):
            self._end(session)
            self._write()
            return None
        return session

    def use(self, session: Session) -> None:
        """Record that a request of the session begins or ends."""
        now_ms = self._clock.now_ms()
        session.used_ms = now_ms
        if self._sessions.pop(session.key, None) is not None:
            self._sessions[session.key] = session
            if now_ms - self._written_ms > WRITE_USES_SECONDS * 1000:
                self._write()

    def end(self, session: Session) -> Promise:
        """End a session; return what is done when the note says so too."""
        self._end(session)
        return self._write()

    def access_changed(self) -> None:
        """End the sessions whose principal has changed."""
        self._end_those_that_do_not_hold()

    def expire(self) -> None:
        """End the sessions whose time is over."""
        if self._clock.now_ms() >= self._next_ms:
            self._end_those_that_do_not_hold()

    def bond(self, name: str | None) -> str:
        """Return the digest of what a session of a principal belongs to; empty if there is no such principal."""
        if name is None:
            return self._token_digest
        principal = self._gate.table.principal(name)
        if principal is None:
            return ""
        bare = msgspec.structs.replace(principal, roles=(), quotas=msgspec.UNSET)
        return hashlib.sha256(b"%d" % self._gate.enforcing + msgspec.json.encode(bare)).hexdigest()

    def _holds(self, session: Session, bonds: dict[str | None, str], now_ms: int) -> bool:
        if session.name not in bonds:
            bonds[session.name] = self.bond(session.name)
        if session.bond != bonds[session.name] or not session.bond:
            return False
        return now_ms < self._end_of(session) or (now_ms < session.ends_ms and self.is_running(session))

    def _end_of(self, session: Session) -> float:
        return min(session.ends_ms, session.used_ms + self._settings.session_idle_seconds * 1000)

    def _end_those_that_do_not_hold(self) -> None:
        bonds: dict[str | None, str] = {}
        now_ms = self._clock.now_ms()
        ended = [one for one in self._sessions.values() if not self._holds(one, bonds, now_ms)]
        for session in ended:
            self._end(session)
        if ended:
            self._write()
        ends = [self._end_of(session) for session in self._sessions.values()]
        self._next_ms = max(min(ends, default=float("inf")), now_ms + WATCH_SECONDS * 1000)

    def _end(self, session: Session) -> None:
        if self._sessions.pop(session.key, None) is not None:
            self.on_ended(session)

    # -- the note ----------------------------------------------------------------------------------------------------

    def _write(self) -> Promise:
        if self._note is None:
            return DONE
        self._written_ms = self._clock.now_ms()
        written = self._writer.write()
        written.when_done(_note_unwritten)
        return written

    def _prepare(self) -> Callable[[], None]:
        """Return the write of the sessions as they are now."""
        note = self._note
        assert note is not None
        kept = KeptSessions(1, [msgspec.structs.replace(session) for session in self._sessions.values()])
        return lambda: note.write(kept)


def _digest(id_: str) -> str:
    return hashlib.sha256(id_.encode("utf-8", "surrogateescape")).hexdigest()


def _note_unwritten(written: Promise) -> None:
    if written.error is not None:
        log.error("the sessions of the console could not be written, so a restart may revive some: %s", written.error)
