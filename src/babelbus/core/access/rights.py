"""The rights of one principal: any row that denies wins, else any row that allows, else no.

Rows are indexed for each principal, role and for everybody (`RowSet`); the rights of a principal are its own rows,
those of its roles and those of everybody. Sessions hold the `Rights` object of their principal for as long as they
live: a change of the table replaces what is inside.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final

from babelbus.core.access.model import (
    ANY_ACTION,
    NAME_PLACE,
    SEPARATOR,
    AccessRefusedError,
    Action,
    Effect,
    Identity,
    Narrowing,
    Row,
    read_pattern,
)
from babelbus.core.access.root import Root
from babelbus.core.subject import CACHED_LENGTH_MAX, EVERYTHING, Element, PathPattern, Pattern, below, exactly
from babelbus.core.subject_index import SubjectIndex

ANSWERS_MAX = 8_192
"""Most answers of each action that a principal remembers; subjects are chosen by clients."""


class _Subjects:
    """The subjects of one row, or of half of it: `a/#` is `a` and what is below."""

    __slots__ = ("action", "elements", "rest", "row")

    def __init__(self, row: Row, pattern: PathPattern) -> None:
        self.row = row
        self.action = row.action
        self.elements = pattern.elements
        self.rest = pattern.rest

    def element(self, depth: int) -> Element | None:
        if depth >= len(self.elements):
            return None
        text = self.elements[depth]
        return ("", False) if text is None else (text, True)

    def match(self, parts: list[str]) -> bool:
        """Return whether a subject with these elements is one of them."""
        elements = self.elements
        if len(parts) <= len(elements) if self.rest else len(parts) != len(elements):
            return False
        return all(element is None or element == part for element, part in zip(elements, parts, strict=False))

    def contain(self, pattern: Pattern) -> bool:
        """Return whether every subject of a pattern is one of them."""
        for depth, element in enumerate(self.elements):
            wanted = pattern.element(depth)
            if wanted is None or (element is not None and wanted != (element, True)):
                return False
        if pattern.element(len(self.elements)) is None:
            return self.rest == pattern.rest
        return self.rest

    def meet(self, pattern: Pattern) -> bool:
        """Return whether some subject of a pattern may be one of them."""
        for depth, element in enumerate(self.elements):
            wanted = pattern.element(depth)
            if wanted is None:
                return pattern.rest
            text, whole = wanted
            if element is not None and (element != text if whole else not element.startswith(text)):
                return False
        if pattern.element(len(self.elements)) is None:
            return self.rest == pattern.rest
        return self.rest


class RowSet:
    """The rows of one principal, one role, or everybody, indexed; rows with `{name}` are kept apart."""

    __slots__ = ("_allowing", "_denying", "_subjects", "templates")

    def __init__(self, rows: Iterable[Row] = (), name: str | None = None) -> None:
        self._allowing: SubjectIndex[_Subjects] = SubjectIndex()
        self._denying: SubjectIndex[_Subjects] = SubjectIndex()
        self._subjects: dict[Row, list[_Subjects]] = {}
        self.templates: dict[Row, None] = {}
        for row in rows:
            self.add(row, name)

    def __len__(self) -> int:
        return len(self._subjects) + len(self.templates)

    def _index(self, row: Row) -> "SubjectIndex[_Subjects]":
        return self._allowing if row.effect is Effect.ALLOW else self._denying

    def add(self, row: Row, name: str | None = None) -> None:
        """Add a row; with a `name`, that of the principal in the place of `{name}`."""
        if row in self._subjects:
            return
        if name is None and NAME_PLACE in row.pattern.split(SEPARATOR):
            self.templates[row] = None
            return
        patterns = read_pattern(row.pattern, name, denies=row.effect is Effect.DENY)
        subjects = self._subjects[row] = [_Subjects(row, pattern) for pattern in patterns]
        for one in subjects:
            self._index(row).add(one)

    def discard(self, row: Row) -> None:
        """Remove a row; a row that is not there is no error."""
        self.templates.pop(row, None)
        for one in self._subjects.pop(row, ()):
            self._index(row).discard(one)

    def find(self, effect: Effect, action: str, subject: str, parts: list[str]) -> Row | None:
        """Return a row of this effect that concerns a subject."""
        index = self._allowing if effect is Effect.ALLOW else self._denying
        if len(index):
            for one in index.candidates(subject):
                if (one.action == action or one.action == ANY_ACTION) and one.match(parts):
                    return one.row
        return None

    def meets(self, effect: Effect, action: str, pattern: Pattern) -> bool:
        """Return whether a row of this effect meets a pattern."""
        index = self._allowing if effect is Effect.ALLOW else self._denying
        return bool(len(index)) and any(
            (one.action == action or one.action == ANY_ACTION) and one.meet(pattern) for one in index.related(pattern)
        )

    def contains(self, effect: Effect, action: str, pattern: Pattern) -> bool:
        """Return whether a row of this effect contains a pattern."""
        index = self._allowing if effect is Effect.ALLOW else self._denying
        return bool(len(index)) and any(
            (one.action == action or one.action == ANY_ACTION) and one.contain(pattern) for one in index.around(pattern)
        )


Refused = Callable[[Identity, Action, str], str]
"""Records a refusal and returns its id."""


class Rights:
    """The rights of one principal, a live object; `version` rises when the rows behind it change."""

    __slots__ = (
        *("__weakref__", "_answers", "_denials", "_inside", "_refused", "_root", "_sets", "_topics", "id", "lost"),
        *("name", "version"),
    )

    def __init__(
        self, name: str, sets: Iterable[RowSet] = (), refused: Refused | None = None, root: Root | None = None
    ) -> None:
        self.name = name
        self.id = ""
        """The id of the principal; see `Principal.id`."""
        self.lost = False
        """Whether the change of the table that is being told took away a right to hear or to read."""
        self._refused = refused
        self.version = 0
        self._answers: dict[Action, dict[str, bool]] = {action: {} for action in Action}
        self._topics: dict[Action, dict[str, bool]] = {action: {} for action in Action}
        self._denials: dict[Action, dict[str, bool]] = {action: {} for action in Action}
        self._sets: tuple[RowSet, ...] = ()
        self.replace(sets, root)

    def replace(self, sets: Iterable[RowSet], root: Root | None = None) -> None:
        """Replace the rows, and the root at which they end: what was answered before is forgotten."""
        self._root = root
        self._inside = None if root is None else _Subjects(Row(self.name, ANY_ACTION, f"{root.name}/#"), root.pattern)
        sets = tuple(sets)
        templates = [row for each in sets for row in each.templates]
        own = RowSet(templates, self.name)
        self._sets = tuple(each for each in (*sets, own) if each)
        self.version += 1
        for answers in chain(self._answers.values(), self._topics.values(), self._denials.values()):
            answers.clear()

    def may(self, action: Action, subject: str) -> bool:
        """Return whether the action is granted on a subject; usually a dictionary look-up."""
        answers = self._answers[action]
        answer = answers.get(subject)
        if answer is None:
            row = self.deciding(action, subject)
            answer = row is not None and row.effect is Effect.ALLOW
            if len(subject) <= CACHED_LENGTH_MAX:
                _keep(answers, subject, answer)
        return answer

    def find_refused(self, action: Action, subjects: Sequence[str]) -> str | None:
        """Return the first subject on which the action is not granted; costs little for subjects asked before."""
        if all(map(self._answers[action].get, subjects)):
            return None
        return next((subject for subject in subjects if not self.may(action, subject)), None)

    def deciding(self, action: Action, subject: str) -> Row | None:
        """Return the row that decides: one that denies, else one that allows, `None` if no row concerns the subject."""
        if self._root is not None and not self._root.contains(subject):
            return None
        name, parts = action.value, subject.split(SEPARATOR)
        for effect in (Effect.DENY, Effect.ALLOW):
            for rows in self._sets:
                row = rows.find(effect, name, subject, parts)
                if row is not None:
                    return row
        return None

    def covers(self, action: Action, *patterns: Pattern) -> bool:
        """Return whether the action is granted on every subject of patterns: each in one row, and no row denies any.

        No subject is let through that `may` denies; a pattern that only several rows together grant is not covered.
        """
        return all(self.overlaps(action, pattern) is Narrowing.WHOLE for pattern in patterns)

    def overlaps(self, action: Action, pattern: Pattern) -> Narrowing:
        """Return how much of a pattern is granted. `PART` may be nothing if rows that deny cut across it."""
        name, sets = action.value, self._sets
        if self._inside is not None and not self._inside.meet(pattern):
            return Narrowing.NONE
        if any(rows.contains(Effect.DENY, name, pattern) for rows in sets):
            return Narrowing.NONE
        if any(rows.contains(Effect.ALLOW, name, pattern) for rows in sets):
            return Narrowing.PART if self.denies(action, pattern) else Narrowing.WHOLE
        if any(rows.meets(Effect.ALLOW, name, pattern) for rows in sets):
            return Narrowing.PART
        return Narrowing.NONE

    def denies(self, action: Action, *patterns: Pattern) -> bool:
        """Return whether a row, or the end of the root, denies the action on some subject of patterns."""
        inside = self._inside
        if inside is not None and not all(inside.contain(pattern) for pattern in patterns):
            return True
        return any(rows.meets(Effect.DENY, action.value, pattern) for pattern in patterns for rows in self._sets)

    def record_refusal(self, principal: Identity, action: Action, subject: str) -> str:
        """Record a refusal in the audit; return the id of the record."""
        return "" if self._refused is None else self._refused(principal, action, subject)

    def may_topic(self, action: Action, name: str) -> bool:
        """Return whether the action is granted on all subjects that a topic records: its name and what is below."""
        answers = self._topics[action]
        answer = answers.get(name)
        if answer is None:
            answer = self.covers(action, *subjects_of_topic(name))
            _keep(answers, name, answer)
        return answer

    def denies_topic(self, action: Action, name: str) -> bool:
        """Return whether a row denies the action on some subject that a topic records."""
        answers = self._denials[action]
        answer = answers.get(name)
        if answer is None:
            answer = self.denies(action, *subjects_of_topic(name))
            _keep(answers, name, answer)
        return answer


def _keep(answers: dict[str, bool], key: str, answer: bool) -> None:
    if len(answers) >= ANSWERS_MAX:
        answers.clear()
    answers[key] = answer


def subjects_of_topic(name: str) -> tuple[Pattern, ...]:
    """Return the patterns of what a topic may hold; reserved topics hold what no single right below `#` covers."""
    if name == STATE_TOPIC:
        return (EVERYTHING,)
    return exactly(name), below(name)


STATE_TOPIC: Final = "$state"
"""It holds values of every subject."""


def owner_of(principal: Identity) -> str:
    """Return what is kept as the owner of something that a principal makes, empty if nobody asks for its rights.

    It is the name, and the id behind a line end, which no name has: a later principal of this name owns nothing of it.
    """
    rights = principal.rights
    if rights is None:
        return ""
    return f"{principal.name}\n{rights.id}" if rights.id else principal.name


def name_of_owner(owner: str) -> str:
    """Return the name of the principal that `owner_of` was asked about."""
    return owner.partition("\n")[0]


def may(principal: Identity, action: Action, subject: str) -> bool:
    """Return whether a principal may do this; asked for a subject or a batch, not for each message."""
    rights = principal.rights
    return rights is None or rights.may(action, subject)


def may_topic(principal: Identity, action: Action, name: str) -> bool:
    """Return whether a principal may do this with everything that a topic holds."""
    rights = principal.rights
    if rights is None:
        return True
    if name in ADMIN_TOPICS and not rights.may(Action.ADMIN, name):
        return False
    return rights.may_topic(action, name)


def covers(principal: Identity, action: Action, *patterns: Pattern) -> bool:
    """Return whether a principal may do this to every subject of patterns."""
    rights = principal.rights
    return rights is None or rights.covers(action, *patterns)


def overlaps(principal: Identity, action: Action, pattern: Pattern) -> Narrowing:
    """Return how much of a pattern is granted to a principal."""
    rights = principal.rights
    return Narrowing.WHOLE if rights is None else rights.overlaps(action, pattern)


def has_lost(before: Identity, now: Identity) -> bool:
    """Return whether a client may hear or read less since the change of the table that is being told.

    The bytes that wait for the client may hold what it may not have any more.
    """
    return now.rights is not None and (now.rights is not before.rights or now.rights.lost)


def check_subscription(principal: Identity, pattern: Pattern, text: str, *, whole: bool) -> None:
    """Check that a principal may subscribe to a pattern: to a part of it, or with `whole` to all of it.

    Raises:
        AccessRefusedError: it may not.
    """
    narrowing = overlaps(principal, Action.SUBSCRIBE, pattern)
    if narrowing is Narrowing.NONE or (whole and narrowing is Narrowing.PART):
        raise refusal(principal, Action.SUBSCRIBE, text)


def refusal(principal: Identity, action: Action, subject: str) -> AccessRefusedError:
    """Return the error of a refusal, which is recorded in the audit."""
    rights = principal.rights
    return AccessRefusedError(
        action, subject, "" if rights is None else rights.record_refusal(principal, action, subject)
    )


def check_may(principal: Identity, action: Action, subject: str) -> None:
    """Check that a principal may do this.

    Raises:
        AccessRefusedError: it may not.
    """
    if not may(principal, action, subject):
        raise refusal(principal, action, subject)


def check_topic(principal: Identity, action: Action, name: str) -> None:
    """Check that a principal may do this with everything that a topic holds.

    Raises:
        AccessRefusedError: it may not.
    """
    if not may_topic(principal, action, name):
        raise refusal(principal, action, name)


ADMIN_TOPICS = frozenset(("$access", "$audit"))
CLIENT_ACTIONS = (Action.PUBLISH, Action.SUBSCRIBE, Action.READ, Action.CONSUME, Action.WRITE_STATE)
CLIENT_ROWS = tuple(Row("role:client", action.value, "#") for action in CLIENT_ACTIONS)
"""The rights of a client in the lists of jebp: every action but to manage and to administer."""
ADMIN_ROWS = (Row("role:admin", ANY_ACTION, "#"),)
CLIENT_RIGHTS = Rights("client", (RowSet(CLIENT_ROWS),))
ADMIN_RIGHTS = Rights("admin", (RowSet(ADMIN_ROWS),))
NOBODY = Identity("", "", Rights(""))
"""A client that has lost all rights."""
