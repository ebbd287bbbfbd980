"""The table: rows, principals and the mode, as entries with an id; it answers and changes, and does no I/O.

Entries of the table are kept by the gate. Others come from the files of a data folder (the lists of jebp clients) or
from the table of the configuration; they are given at each start and reload (`import_entries`) and never kept.
"""

from collections.abc import Iterable, Sequence
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from babelbus.config import QuotaSettings
from babelbus.core.access.model import (
    ANONYMOUS,
    ANY_ACTION,
    EVERYBODY,
    NAME_PLACE,
    ROLE_PREFIX,
    SEPARATOR,
    Action,
    Effect,
    InvalidAccessError,
    Principal,
    Row,
    check_pattern,
    is_name,
    read_pattern,
)
from babelbus.core.access.rights import ADMIN_ROWS, CLIENT_ROWS, Refused, Rights, RowSet
from babelbus.core.access.root import Root
from babelbus.core.access.table_file import FILE_ID, FileIds
from babelbus.identities.credential import Place, places_of

HEARING: Final = frozenset(
    (ANY_ACTION, *(action.value for action in (Action.SUBSCRIBE, Action.READ, Action.CONSUME, Action.ADMIN)))
)
"""Actions by which a client is sent something."""
ADMIN_ROLE: Final = "admin"
CLIENT_ROLE: Final = "client"


class Mode(msgspec.Struct, frozen=True):
    """The entry that turns the gate on at run time."""

    enforce: bool


Entry = Row | Principal | Mode | FileIds
Edit = tuple[str, Entry | None]
"""The id of an entry and the entry, `None` to remove it."""
MODE_ID = '["mode"]'
BUILT_IN: Final = "built in"
KEPT: Final = "table"
LISTED: Final = "client lists"
"""The origin of the principals that the lists of clients name."""


class Explanation(msgspec.Struct, frozen=True):
    """The answer of the table to one question, and the row that decides, if any."""

    allowed: bool
    row: Row | None
    origin: str | None
    roles: tuple[str, ...]
    exists: bool
    subject: str
    """The subject that the principal means."""


def id_of(entry: Entry) -> str:
    """Return the id of an entry: equal rows have one, and so has each principal."""
    if isinstance(entry, Row):
        parts = ["row", entry.who, entry.action, entry.pattern, entry.effect.value]
    elif isinstance(entry, Principal):
        parts = ["principal", entry.name]
    else:
        return FILE_ID if isinstance(entry, FileIds) else MODE_ID
    return msgspec.json.encode(parts).decode()


class Table:
    """All entries, indexed. A row that several origins give stays until the last of them takes it away."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        """The entries that the gate keeps, by id."""
        self.version = 0
        self._imported: dict[str, tuple[Entry, ...]] = {BUILT_IN: (*CLIENT_ROWS, *ADMIN_ROWS)}
        self._sets: dict[str, RowSet] = {}
        self._principals: dict[str, tuple[Principal, str]] = {}
        self._owners: dict[Place, str] = {}
        self.on_refused: Refused | None = None
        self._rights: WeakValueDictionary[str, Rights] = WeakValueDictionary()
        for row in (*CLIENT_ROWS, *ADMIN_ROWS):
            self._set_of(row.who).add(row)
        self._find_principals()

    # -- reading -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[tuple[Row, str]]:
        """Return all rows with their origins, sorted."""
        found = {entry: KEPT for entry in self.entries.values() if isinstance(entry, Row)}
        for origin, entries in self._imported.items():
            for entry in entries:
                if isinstance(entry, Row):
                    found.setdefault(entry, origin)
        return sorted(found.items(), key=lambda pair: (pair[0].who, pair[0].action, pair[0].pattern))

    @property
    def row_count(self) -> int:
        """Number of rows, those that are built in among them."""
        return sum(map(len, self._sets.values()))

    @property
    def principal_count(self) -> int:
        """Number of principals."""
        return len(self._principals)

    def principals(self) -> list[tuple[Principal, str]]:
        """Return all principals with their origins, by name."""
        return [self._principals[name] for name in sorted(self._principals)]

    def principal(self, name: str) -> Principal | None:
        """Return a principal, `None` if nobody has the name."""
        found = self._principals.get(name)
        return None if found is None else found[0]

    def origin(self, name: str) -> str:
        """Return where a principal comes from."""
        return self._principals[name][1]

    def roles(self) -> dict[str, list[str]]:
        """Return the names of all roles with the principals that have them."""
        roles: dict[str, list[str]] = {}
        for row, _ in self.rows():
            if row.who.startswith(ROLE_PREFIX):
                roles.setdefault(row.who.removeprefix(ROLE_PREFIX), [])
        for principal, _ in self.principals():
            for role in principal.roles:
                roles.setdefault(role, []).append(principal.name)
        return dict(sorted(roles.items()))

    def quotas(self) -> dict[str, QuotaSettings]:
        """Return the quotas of the principals that have their own."""
        return {
            name: principal.quotas
            for name, (principal, _) in self._principals.items()
            if isinstance(principal.quotas, QuotaSettings)
        }

    @property
    def enforced(self) -> bool:
        """Whether the table says that the gate is on."""
        mode = self.entries.get(MODE_ID)
        return isinstance(mode, Mode) and mode.enforce

    def rights(self, name: str) -> Rights:
        """Return the rights of a principal, one live object for each name; an unknown principal has none."""
        rights = self._rights.get(name)
        if rights is None:
            rights = self._rights[name] = Rights(name, self._sets_of(name), self.on_refused, self.root(name))
            rights.id = self._id_of(name)
        return rights

    def root(self, name: str) -> Root | None:
        """Return the root of a principal, `None` if its subjects are absolute."""
        principal = self.principal(name)
        return None if principal is None else principal.below

    def whos(self, name: str) -> tuple[str, ...]:
        """Return who must stand in a row for the row to be one of a principal's: its name, its roles, everybody."""
        principal = self.principal(name)
        return _whos_of(name, () if principal is None else principal.roles)

    def rights_after(self, edits: Iterable[Edit], name: str) -> Rights:
        """Return the rights that a principal would have behind edits, which are not applied."""
        entries = dict(self.entries)
        for id_, entry in edits:
            entries.pop(id_, None)
            if entry is not None:
                entries[id_] = entry
        everything = [*entries.values(), *(entry for imported in self._imported.values() for entry in imported)]
        principal = next((one for one in everything if isinstance(one, Principal) and one.name == name), None)
        if principal is None:
            return Rights(name)
        whos = _whos_of(name, principal.roles)
        rows = [one for one in everything if isinstance(one, Row) and one.who in whos]
        return Rights(name, [RowSet(rows)], None, principal.below)

    def explain(self, name: str, action: Action, subject: str) -> Explanation:
        """Return whether a principal may do this to what it calls the subject, and the row that decides."""
        root = self.root(name)
        if root is not None:
            subject = root.absolute(subject)
        row = self.rights(name).deciding(action, subject)
        principal = self.principal(name)
        origin = None if row is None else dict(self.rows()).get(row)
        return Explanation(
            row is not None and row.effect is Effect.ALLOW,
            row,
            origin,
            () if principal is None else principal.roles,
            principal is not None or name == ANONYMOUS,
            subject,
        )

    def allowing(self, row: Row) -> tuple[Row, str] | None:
        """Return a row that allows all that `row` allows, with its origin; `None` without one or if a row denies it."""
        principal = self.principal(row.who)
        roles = () if principal is None else principal.roles
        whos = {row.who, EVERYBODY, *(ROLE_PREFIX + role for role in roles)}
        name = "name" if principal is None else row.who
        patterns = read_pattern(row.pattern, name)

        def covers(other: Row) -> bool:
            rows = RowSet((other,), name)
            return other.who in whos and all(rows.contains(other.effect, row.action, pattern) for pattern in patterns)

        rows = [pair for pair in self.rows() if covers(pair[0])]
        if any(other.effect is Effect.DENY for other, _ in rows):
            return None
        return next(iter(rows), None)

    def faults(self) -> list[str]:
        """Return what is odd: rows that can never match or decide, and principals without rows."""
        found = []
        rows = [row for row, _ in self.rows()]
        names, roles = {ANONYMOUS, *self._principals}, self.roles()
        for row in rows:
            role = row.who.removeprefix(ROLE_PREFIX)
            if row.who.startswith(ROLE_PREFIX):
                if not roles[role] and row not in self._imported[BUILT_IN]:
                    found.append(f"{_text(row)}: no principal has the role {role}")
            elif row.who != EVERYBODY and row.who not in names:
                found.append(f"{_text(row)}: there is no principal {row.who}")
            elif NAME_PLACE in row.pattern.split(SEPARATOR) and row.who != EVERYBODY and not is_name(row.who):
                found.append(f"{_text(row)}: the name of the principal cannot stand in a pattern")
            try:
                check_pattern(row.pattern)
            except InvalidAccessError as error:  # of an earlier version
                found.append(f"{_text(row)}: {error}")
            root = self.root(row.who)
            if root is not None and not RowSet((row,), row.who).meets(row.effect, row.action, root.pattern):
                found.append(f"{_text(row)}: the subjects of {row.who} are below {root.name}; patterns are absolute")
            if row.effect is Effect.ALLOW and self._is_denied(row):
                found.append(f"{_text(row)}: a row that denies covers it, and wins")
        for name in sorted(self._principals):
            principal = self._principals[name][0]
            if not any(self._sets.get(who) for who in _whos_of(name, principal.roles) if who != EVERYBODY):
                found.append(f"principal {name} has no rows, also not by a role")
        return found

    # -- changing ----------------------------------------------------------------------------------------------------

    def check(self, edits: Sequence[Edit]) -> None:
        """Check that edits are valid together.

        Raises:
            InvalidAccessError: an entry is not valid, or a credential belongs to two principals.
        """
        changed = {id_ for id_, _ in edits}
        owners = {
            place: name for place, name in self._owners.items() if id_of(self._principals[name][0]) not in changed
        }
        for id_, entry in edits:
            if entry is None:
                continue
            assert id_ == id_of(entry)
            if isinstance(entry, Mode | FileIds):
                continue
            entry.check()
            if isinstance(entry, Principal):
                if entry.name == ANONYMOUS:
                    raise InvalidAccessError(f"{ANONYMOUS!r} is the principal of clients that prove nothing")
                for one in entry.credentials:
                    for place in places_of(one):
                        owner = owners.setdefault(place, entry.name)
                        if owner != entry.name:
                            raise InvalidAccessError(
                                f"principal {owner} has the {one.kind} credential {one.id} already"
                            )

    def apply(self, edits: Iterable[Edit]) -> None:
        """Add and remove what edits say that `check` has seen; rights that sessions hold change with them."""
        touched: set[str] = set()
        losers: set[str] = set()
        people = False
        for id_, entry in edits:
            before = self.entries.pop(id_, None)
            if entry is not None:
                self.entries[id_] = entry
            if isinstance(before, Row) and before != entry and not self._is_imported(before):
                self._set_of(before.who).discard(before)
                touched.add(before.who)
                losers |= _losers(before, Effect.ALLOW)
            if isinstance(entry, Row):
                self._set_of(entry.who).add(entry)
                touched.add(entry.who)
                losers |= _losers(entry, Effect.DENY)
            people |= isinstance(before, Principal) or isinstance(entry, Principal)
        if people:
            losers |= self._find_principals()
        self._refresh(None if people else touched, losers)

    def import_entries(self, origin: str, entries: Iterable[Entry]) -> None:
        """Replace the entries that come from one origin."""
        before, after = self._imported.get(origin, ()), tuple(entries)
        self._imported[origin] = after
        losers: set[str] = set()
        kept = {entry for entry in self.entries.values() if isinstance(entry, Row)}
        for entry in before:
            if isinstance(entry, Row) and entry not in kept and not self._is_imported(entry):
                self._set_of(entry.who).discard(entry)
                losers |= _losers(entry, Effect.ALLOW)
        for entry in after:
            if isinstance(entry, Row):
                self._set_of(entry.who).add(entry)
                if entry not in before:
                    losers |= _losers(entry, Effect.DENY)
        losers |= self._find_principals()
        self._refresh(None, losers)

    def forget_losses(self) -> None:
        """End the change: everybody who has lost a right has been told."""
        for rights in self._rights.values():
            rights.lost = False

    def _is_denied(self, row: Row) -> bool:
        """Return whether rows of the same principal, role or of everybody deny all that a row allows."""
        patterns = read_pattern(row.pattern, "name")
        return bool(patterns) and all(
            any(self._set_of(who).contains(Effect.DENY, row.action, pattern) for who in (row.who, EVERYBODY))
            for pattern in patterns
        )

    def _is_imported(self, row: Row) -> bool:
        return any(row in entries for entries in self._imported.values())

    def _set_of(self, who: str) -> RowSet:
        rows = self._sets.get(who)
        if rows is None:
            rows = self._sets[who] = RowSet()
        return rows

    def _find_principals(self) -> set[str]:
        """Find the principals: those of the table first, imported ones where the name is free.

        Returns the names of principals whose roles or root have changed, so that they may have lost a right.
        """
        before = self._principals
        self._principals = {}
        self._owners = {}
        mine = [(entry, KEPT) for entry in self.entries.values()]
        others = [(entry, origin) for origin, entries in self._imported.items() for entry in entries]
        for entry, origin in (*mine, *others):
            if isinstance(entry, Principal) and self._principals.setdefault(entry.name, (entry, origin))[0] is entry:
                for one in entry.credentials:
                    for place in places_of(one):
                        self._owners.setdefault(place, entry.name)
        return {name for name, (one, _) in before.items() if _standing(self.principal(name)) != _standing(one)}

    def _sets_of(self, name: str) -> list[RowSet]:
        principal = self.principal(name)
        if principal is None and name != ANONYMOUS:
            return []
        return [self._set_of(who) for who in self.whos(name)]

    def _id_of(self, name: str) -> str:
        principal = self.principal(name)
        return principal.id if principal is not None and principal.id is not msgspec.UNSET else ""

    def _refresh(self, touched: set[str] | None, losers: set[str]) -> None:
        """Replace what is inside the rights of the principals whose rows have changed; `None` is all.

        Principals and roles among the `losers` have lost a right to hear or to read.
        """
        everybody = touched is None or EVERYBODY in touched
        for name, rights in list(self._rights.items()):
            whos = self.whos(name)
            if everybody or touched is None or not touched.isdisjoint(whos):
                rights.replace(self._sets_of(name), self.root(name))
                rights.id = self._id_of(name)
                rights.lost |= name in losers or not losers.isdisjoint(whos)


def _text(row: Row) -> str:
    return f"{row.effect.value} {row.who} {row.action} {row.pattern}"


def _losers(row: Row, effect: Effect) -> set[str]:
    """Return whom a row of this effect concerns, if it is about what clients are sent."""
    return {row.who} if row.effect is effect and row.action in HEARING else set()


def _whos_of(name: str, roles: Iterable[str]) -> tuple[str, ...]:
    # A client of a list may be called `role:admin`, as earlier versions allowed: the rows of the role are not its own.
    own = () if name.startswith(ROLE_PREFIX) or name == EVERYBODY else (name,)
    return (*own, *(ROLE_PREFIX + role for role in roles), EVERYBODY)


def _standing(principal: Principal | None) -> tuple[object, ...]:
    """Return what decides on the rights of a principal, beside its rows."""
    return () if principal is None else (principal.id, frozenset(principal.roles), principal.root)


def edits_for(put: Iterable[Entry] = (), remove: Iterable[Entry] = ()) -> list[Edit]:
    """Return the edits that remove entries and put others."""
    edits: dict[str, Entry | None] = {id_of(entry): None for entry in remove}
    edits |= {id_of(entry): entry for entry in put}
    return list(edits.items())
