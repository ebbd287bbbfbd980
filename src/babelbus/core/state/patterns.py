"""Keys and patterns of the state: where wildcards are allowed, what a pattern matches, which pattern covers another.

An element that is exactly `?` stands for one element, one that is exactly `#` at the end for several. How many depends
(docs/specifications/worterbuch.md, 2.2): none or more where the store is asked, one or more where events are awaited.
"""

import sys
from enum import Enum, auto

from babelbus.core.state.key_index import SEPARATOR, KeyPattern
from babelbus.core.subject import PathPattern

WILDCARD = "?"
MULTI_WILDCARD = "#"
ELEMENTS_MAX = 1024
"""Of a key or pattern that a client sends: each costs a node of the tree, and taking it away costs their square."""
KEY_BYTES_MAX = 4096
"""Longest key or pattern that a client may send, unless the operator chose another limit (`state.key_bytes_max`)."""


class PatternFault(Enum):
    """Reason why a text is no key or no pattern; each protocol has its own code for it."""

    WILDCARD = auto()
    """A `?` where a key is needed."""
    MULTI_WILDCARD = auto()
    """A `#` where a key is needed, or before the end of a pattern."""
    SECOND_MULTI_WILDCARD = auto()
    """A `#` before the one at the end, for clients to which that is an error of its own."""


_FAULTS = {WILDCARD: PatternFault.WILDCARD, MULTI_WILDCARD: PatternFault.MULTI_WILDCARD}


def size_fault(key: str, bytes_max: int) -> str | None:
    """Return why a key or pattern is too long, as the end of a sentence that begins with it; `None` if it is not."""
    length = len(key)
    if length * 4 > bytes_max and (length > bytes_max or len(key.encode("utf-8", "surrogatepass")) > bytes_max):
        return f"has more than {bytes_max:,} bytes (state.key_bytes_max)"
    if length >= ELEMENTS_MAX and key.count(SEPARATOR) >= ELEMENTS_MAX:
        return f"has more than {ELEMENTS_MAX:,} elements"
    return None


def check_key(key: str) -> PatternFault | None:
    """Return the fault of a key that is to have no wildcard, `None` if it has none; the first from the left decides."""
    if WILDCARD in key or MULTI_WILDCARD in key:
        for element in key.split(SEPARATOR):
            if element in _FAULTS:
                return _FAULTS[element]
    return None


def check_pattern(pattern: str, *, historic: bool = False) -> PatternFault | None:
    """Return the fault of a pattern, `None` if it is one: `#` stands only at the end.

    `historic` servers (0.30 to 0.34) had an error of their own for a second `#` before the one at the end.
    """
    if MULTI_WILDCARD in pattern:
        *elements, last = pattern.split(SEPARATOR)
        if MULTI_WILDCARD in elements:
            if historic and last == MULTI_WILDCARD:
                return PatternFault.SECOND_MULTI_WILDCARD
            return PatternFault.MULTI_WILDCARD
    return None


def check_parent_pattern(pattern: str) -> PatternFault | None:
    """Return the fault of the pattern of `pLs`, `None` if it is one: `?` anywhere, `#` nowhere."""
    if MULTI_WILDCARD in pattern and MULTI_WILDCARD in pattern.split(SEPARATOR):
        return PatternFault.MULTI_WILDCARD
    return None


def store_pattern(pattern: str) -> KeyPattern:
    """Return what the store is asked for a pattern that passed its check: `a/#` means `a` too."""
    elements, rest = _parse(pattern)
    return KeyPattern(elements, rest)


def subscription_pattern(pattern: str) -> PathPattern:
    """Return whose events a pattern that passed its check awaits: `a/#` those of `a/b`, not of `a`."""
    elements, rest = _parse(pattern)
    return PathPattern(elements, rest)


def pattern_text(pattern: KeyPattern) -> str:
    """Return the text of a pattern that the store is asked for."""
    parts = [WILDCARD if element is None else element for element in pattern.elements]
    return SEPARATOR.join([*parts, MULTI_WILDCARD] if pattern.rest else parts)


def _parse(pattern: str) -> tuple[tuple[str | None, ...], bool]:
    elements = pattern.split(SEPARATOR)
    rest = elements[-1] == MULTI_WILDCARD
    if rest:
        elements.pop()
    # Interned: a client may have 10,000 patterns that differ in one element.
    return tuple([None if element == WILDCARD else sys.intern(element) for element in elements]), rest


def subjects_of(pattern: KeyPattern) -> tuple[PathPattern, ...]:
    """Return the subjects of a pattern over keys, whose rest may be empty."""
    if not pattern.rest:
        return (PathPattern(pattern.elements),)
    beyond = PathPattern(pattern.elements, rest=True)
    return (PathPattern(pattern.elements), beyond) if pattern.elements else (beyond,)


def children_pattern(parent: str | None) -> str:
    """Return the pattern that the right to list the children of a parent is checked against (section 10)."""
    return WILDCARD if parent is None else f"{parent}{SEPARATOR}{WILDCARD}"


def covers(granted: str, requested: str) -> bool:
    """Return whether the right to a pattern is the right to another (section 10).

    A `#` covers one or more elements, whatever they are, a `?` any one but `#`; otherwise elements are equal, so that
    a wildcard that was requested is covered by a granted one only.
    """
    wanted = requested.split(SEPARATOR)
    given = granted.split(SEPARATOR)
    for at, element in enumerate(given):
        if at == len(wanted):
            return False
        if element == MULTI_WILDCARD:
            return True
        if element != wanted[at] and (element != WILDCARD or wanted[at] == MULTI_WILDCARD):
            return False
    return len(given) == len(wanted)
