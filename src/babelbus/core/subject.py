"""Subjects, the names of topics, and patterns over subjects.

A subject is a path of elements separated by `/`. One that came as bytes without an encoding (sbus) is UTF-8 with
`surrogateescape`: every byte string is a subject, and leaves as the same bytes. The meaning of a pattern is the
business of the protocol in whose language it is written; the core asks it through `Pattern`.
"""

import re
from typing import Final, Protocol

import msgspec

from babelbus.errors import InvalidTopicNameError

NAME_BYTES_MAX = 249
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f,]")


def check_topic_name(name: str) -> None:
    """Check that a topic may have this name: 1 to 249 bytes of UTF-8, no comma, no control character.

    Raises:
        InvalidTopicNameError: it may not; the message says why.
    """
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= NAME_BYTES_MAX:
        raise InvalidTopicNameError(f"a topic name has 1 to {NAME_BYTES_MAX} bytes, this one has {size}")
    found = _CONTROL.search(name)
    if found:
        raise InvalidTopicNameError(f"a topic name has no comma and no control character: {name!r}")
    if not name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InvalidTopicNameError("a topic name is valid UTF-8")


SECRETS: Final = "!/cred/"
"""Begins the subjects that some processes alone may see, as sbus defines them: nothing under them leaves sbus."""


def is_secret(subject: str) -> bool:
    """Return whether a subject, or all that a pattern means, is secret to some processes."""
    return subject.startswith(SECRETS)


def may_hold_secrets(topic: str) -> bool:
    """Return whether a topic of this name would record secret subjects, if they were recorded."""
    beginning = f"{topic}/"
    return SECRETS.startswith(beginning) or beginning.startswith(SECRETS)


def is_text(subject: str) -> bool:
    """Return whether a subject is Unicode, and not bytes in disguise (`surrogateescape`); cheap for ASCII."""
    if subject.isascii():
        return True
    try:
        subject.encode()
    except UnicodeEncodeError:
        return False
    return True


Element = tuple[str, bool]
"""An element of a pattern: how an element of a subject that matches begins, and whether that is the whole element."""
ANY: Element = ("", False)


class Pattern(Protocol):
    """Which subjects a subscription wants. The answer depends on the subject alone and never changes."""

    @property
    def literal(self) -> str | None:
        """The one subject that matches, or `None` when there may be several."""

    @property
    def rest(self) -> bool:
        """Whether subjects that match have one or more elements behind those of the pattern; otherwise none."""

    def element(self, depth: int) -> Element | None:
        """Return the element at a depth (from 0), `None` behind the last one. A shorter beginning is right too, and
        slower.
        """

    def matches(self, subject: str) -> bool:
        """Return whether a subject is wanted."""


class PathPattern(msgspec.Struct, frozen=True):
    """A pattern by elements from the left, `None` for any; `rest` lets one or more follow."""

    elements: tuple[str | None, ...]
    rest: bool = False

    @property
    def literal(self) -> str | None:
        """The one subject that matches, or `None` when there may be several."""
        if self.rest or None in self.elements:
            return None
        return "/".join(element for element in self.elements if element is not None)

    def element(self, depth: int) -> Element | None:
        """Return the element at a depth (from 0), `None` behind the last one."""
        if depth >= len(self.elements):
            return None
        text = self.elements[depth]
        return ANY if text is None else (text, True)

    def matches(self, subject: str) -> bool:
        """Return whether a subject is wanted."""
        count = len(self.elements)
        parts = subject.split("/", count)  # the elements behind those of the pattern are one part
        if len(parts) <= count if self.rest else len(parts) != count:
            return False
        return all(element is None or element == part for element, part in zip(self.elements, parts, strict=False))


def text_of(pattern: Pattern) -> str:
    """Return a pattern as it stands in messages: `?` is one element, `*` the end of an element, `#` what follows."""
    parts: list[str] = []
    while (element := pattern.element(len(parts))) is not None:
        text, whole = element
        parts.append(text if whole else f"{text}*" if text else "?")
    return "/".join([*parts, "#"] if pattern.rest else parts)


EVERYTHING = PathPattern((), rest=True)


def exactly(subject: str) -> PathPattern:
    """Return the pattern of one subject."""
    return PathPattern(tuple(subject.split("/")))


def below(subject: str) -> PathPattern:
    """Return the pattern of everything below a subject, without itself."""
    return PathPattern(tuple(subject.split("/")), rest=True)


class TopicTable:
    """Which topic records a subject: the one whose name is its longest prefix by elements.

    See: docs/design/design.md, section 1.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._cache: dict[str, str | None] = {}

    def replace(self, names: set[str]) -> None:
        """Replace the names of the topics."""
        self.names = set(names)
        self._cache.clear()

    def change(self, name: str, *, there: bool) -> None:
        """Add the name of a topic, or remove it."""
        (self.names.add if there else self.names.discard)(name)
        self._cache.clear()

    def find(self, subject: str) -> str | None:
        """Return the name of the topic that records a subject, or `None`. Usually costs a dictionary look-up."""
        found = self._cache.get(subject, "")
        if found != "":
            return found
        name: str | None = subject
        while name is not None and name not in self.names:
            parent, slash, _ = name.rpartition("/")
            name = parent if slash else None
        if len(self._cache) >= CACHE_MAX:  # subjects are chosen by clients
            self._cache.clear()
        if len(subject) <= CACHED_LENGTH_MAX:
            self._cache[subject] = name
        return name


LENGTH_MAX = 2**19
"""Longest subject that a stored record may name: longer than those of sbus, whose packets end before 400 kB."""
CACHE_MAX = 65_536
CACHED_LENGTH_MAX = 256
"""Longer subjects are looked up each time: a client that makes up 400 kB ones must not fill the memory with them."""
