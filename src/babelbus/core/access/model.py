"""The words of access control: actions, rows, principals with their credentials, and the identity of a connection.

A row allows or denies an action on the subjects of a pattern to a principal, to a role (`role:NAME`) or to everybody
(`*`). In the pattern of a row, `?` is one whole element, `#` at the end is the element before it and everything below,
and `{name}` is one whole element, the principal's own name. A brace of a subject is written twice.
"""

import re
from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol

import msgspec

from babelbus.config import QuotaSettings
from babelbus.core.access.root import InvalidRootError, Root, check_root, root_of
from babelbus.core.subject import PathPattern, Pattern
from babelbus.errors import BabelbusError
from babelbus.identities.credential import Credential

ROLE_PREFIX: Final = "role:"
EVERYBODY: Final = "*"
ANY_ACTION: Final = "*"
ANONYMOUS: Final = "anonymous"
"""The principal of clients that prove nothing; it has the rows of its own name and those of everybody."""
NAME_PLACE: Final = "{name}"
NAME_LENGTH_MAX = 128
PATTERN_BYTES_MAX = 4096
ONE, REST, SEPARATOR = "?", "#", "/"
_LONE_BRACE = re.compile(r"\{[^{}]*\}?|\}")
_NAME = re.compile(r"[^\s/?#*,{}\x00-\x1f\x7f]+")


class InvalidAccessError(BabelbusError):
    """A row or a principal is not valid; the message names the part."""


class Action(Enum):
    """The actions that a row allows or denies."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    READ = "read"
    CONSUME = "consume"
    WRITE_STATE = "write-state"
    MANAGE = "manage"
    ADMIN = "admin"

    __hash__ = object.__hash__  # members are single objects; the hash of Enum costs a call


ACTIONS: Final = {action.value: action for action in Action}


class Effect(Enum):
    """The effect of a row."""

    ALLOW = "allow"
    DENY = "deny"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the table; the action `None` means every action."""

    who: str
    action: str
    pattern: str
    effect: Effect = Effect.ALLOW

    def check(self) -> None:
        """Check the row.

        Raises:
            InvalidAccessError: a part is not valid.
        """
        if self.who != EVERYBODY:
            check_name(self.who.removeprefix(ROLE_PREFIX))
        if self.action != ANY_ACTION and self.action not in ACTIONS:
            names = ", ".join([*ACTIONS, ANY_ACTION])
            raise InvalidAccessError(f"there is no action {self.action!r}; the actions are {names}")
        check_pattern(self.pattern)


class Principal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One principal: its roles (without `role:`), its credentials, its quotas if the defaults are not for it, and the
    root that its subjects are relative to, if it has one.
    """

    name: str
    roles: tuple[str, ...] = ()
    credentials: tuple[Credential, ...] = ()
    quotas: QuotaSettings | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    """Another one when a principal of this name is removed and added again; the gate sets it, and principals of files
    and those from before there were ids have none."""
    root: str | msgspec.UnsetType = msgspec.UNSET

    def check(self) -> None:
        """Check the names and the root.

        Raises:
            InvalidAccessError: a name or the root is not valid.
        """
        for name in (self.name, *self.roles):
            check_name(name)
        if isinstance(self.root, str):
            try:
                check_root(self.root)
            except InvalidRootError as error:
                raise InvalidAccessError(str(error)) from error

    @property
    def below(self) -> Root | None:
        """The root, if there is one."""
        return root_of(self.root) if isinstance(self.root, str) else None


class Narrowing(Enum):
    """How much of a pattern a principal is granted."""

    WHOLE = "whole"
    PART = "part"
    NONE = "none"


class Granted(Protocol):
    """The rights of an identity, as the core asks for them; `Rights` are those of the table."""

    id: str
    """The id of the principal."""
    lost: bool
    """Whether the change of the table that is being told took away a right to hear or to read."""

    def may(self, action: Action, subject: str) -> bool:
        """Return whether the action is granted on a subject."""

    def find_refused(self, action: Action, subjects: Sequence[str]) -> str | None:
        """Return the first subject on which the action is not granted."""

    def may_topic(self, action: Action, name: str) -> bool:
        """Return whether the action is granted on all subjects that a topic records."""

    def covers(self, action: Action, *patterns: Pattern) -> bool:
        """Return whether the action is granted on every subject of patterns."""

    def overlaps(self, action: Action, pattern: Pattern) -> Narrowing:
        """Return how much of a pattern is granted."""

    def denies(self, action: Action, *patterns: Pattern) -> bool:
        """Return whether a row denies the action on some subject of patterns."""

    def denies_topic(self, action: Action, name: str) -> bool:
        """Return whether a row denies the action on some subject that a topic records."""

    def record_refusal(self, principal: "Identity", action: Action, subject: str) -> str:
        """Record a refusal in the audit; return the id of the record."""


class Identity(msgspec.Struct, frozen=True):
    """The verified client of a connection. `source` goes into `ce_source`: protocol and name.

    `rights` is `None` for the server itself, and while the gate is off for clients whose protocol has no list of its
    own: then nothing is checked. With a `root`, the client names its subjects relative to the root.
    """

    source: str
    name: str
    rights: Granted | None
    root: Root | None = None

    def absolute(self, name: str) -> str:
        """Return the subject, or pattern, that the client means by a name."""
        return name if self.root is None else self.root.absolute(name)

    def relative(self, subject: str) -> str:
        """Return what the client calls a subject."""
        return subject if self.root is None else self.root.relative(subject)

    def relative_text(self, text: str) -> str:
        """Return a message of the server with the names as the client calls them."""
        return text if self.root is None else self.root.relative_text(text)


SERVER: Final = Identity("server", "server", None)
"""The server itself: nobody else writes the topics whose names it reserves."""
CLIENT: Final = Identity("", "", None)
"""A client of whom nothing is known and who may do whatever is not reserved."""


class AccessRefusedError(BabelbusError):
    """The principal has no right to do this. `id` names the refusal in the audit, if it is recorded."""

    def __init__(self, action: Action, subject: str, id: str = "") -> None:  # noqa: A002  # the word of the field
        super().__init__(f"no right to {action.value} {subject!r}" + (f" (refusal {id})" if id else ""))
        self.action, self.subject, self.id = action, subject, id


def check_name(name: str) -> None:
    """Check the name of a principal or a role: one element of a subject without a wildcard, blanks or commas.

    Raises:
        InvalidAccessError: the name is not valid.
    """
    if not is_name(name):
        raise InvalidAccessError(
            f"{name!r} is no name: a name has 1 to {NAME_LENGTH_MAX} characters, no blank and none of / ? # * , {{ }}"
        )


def is_name(name: str) -> bool:
    """Return whether a principal or a role may have this name."""
    return (
        len(name) <= NAME_LENGTH_MAX
        and _NAME.fullmatch(name) is not None
        and not name.startswith(ROLE_PREFIX)
        and name.isprintable()
    )


def check_pattern(pattern: str) -> None:
    """Check the pattern of a row.

    Raises:
        InvalidAccessError: the pattern is empty, too long, or has a wildcard where none is allowed.
    """
    if not pattern or len(pattern.encode("utf-8", "surrogatepass")) > PATTERN_BYTES_MAX:
        raise InvalidAccessError(f"a pattern has 1 to {PATTERN_BYTES_MAX:,} bytes")
    elements = pattern.split(SEPARATOR)
    if REST in elements[:-1]:
        raise InvalidAccessError(f"pattern {pattern!r}: # stands only at the end")
    for element in elements:
        if element == "*":
            raise InvalidAccessError(f"pattern {pattern!r}: * is no wildcard here; ? is one element, # the rest")
        brace = None if element == NAME_PLACE else _find_lone_brace(element)
        if brace == NAME_PLACE:
            raise InvalidAccessError(f"pattern {pattern!r}: {NAME_PLACE} is a whole element")
        if brace is not None:
            raise InvalidAccessError(
                f"pattern {pattern!r}: {brace} stands for nothing, as {NAME_PLACE} does for the name of the principal;"
                " a brace of a subject is written twice: {{ and }}"
            )


def _find_lone_brace(element: str) -> str | None:
    """Return the first brace of an element that is not written twice, with the text up to its end."""
    if "{" not in element and "}" not in element:
        return None
    found = _LONE_BRACE.search(element.replace("{{", "").replace("}}", ""))
    return None if found is None else found[0]


def read_pattern(pattern: str, name: str | None = None, *, denies: bool = False) -> tuple[PathPattern, ...]:
    """Return the subjects of a row's pattern for the principal `name`; none if the name cannot stand in the pattern.

    Rows of earlier versions may have braces that are not written twice. Such an element is taken as it is written; in
    a row that denies, it is any element: a misspelt `{name}` denied nothing, and must not allow anything.
    """
    elements: list[str | None] = []
    parts = pattern.split(SEPARATOR)
    for element in parts:
        if element == NAME_PLACE:
            if name is None or not is_name(name):
                return ()
            elements.append(name)
        elif element == ONE:
            elements.append(None)
        elif _find_lone_brace(element) is None:
            elements.append(element.replace("{{", "{").replace("}}", "}"))
        else:
            elements.append(None if denies else element)
    if parts[-1] != REST:
        return (PathPattern(tuple(elements)),)
    below = PathPattern(tuple(elements[:-1]), rest=True)
    return (PathPattern(below.elements), below) if below.elements else (below,)
