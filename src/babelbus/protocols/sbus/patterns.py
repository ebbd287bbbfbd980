"""The pattern language of sbus, exactly as the reference daemon matches it (docs/specifications/sbus.md, section 4.1).

Keys and patterns are byte strings. In the core a key is a subject: its bytes as UTF-8 with `surrogateescape`, so that
every key has a subject of its own and leaves as the same bytes. Patterns are compared as bytes: one may end in the
middle of a letter.
"""

import codecs

from babelbus.core.subject import Element

PREFIX_MAX = 256
"""Most bytes of the beginning of an element that `SbusPattern.element` returns: each length costs a look-up."""
make_decoder = codecs.getincrementaldecoder("utf-8")


def subject_of(key: bytes) -> str:
    """Return the subject of a key."""
    return key.decode("utf-8", "surrogateescape")


def key_of(subject: str) -> bytes | None:
    """Return the key of a subject, `None` if sbus cannot express it: a NUL, or a letter that no bytes stand for."""
    try:
        key = subject.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None
    return None if b"\0" in key else key


class SbusPattern:
    """One pattern. Rules 1 to 7 of section 4.1, put by elements between `/`, which is the same and runs in C."""

    __slots__ = ("_elements", "_prefix", "literal", "rest", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        *elements, last = text.split(b"/")
        # A "/" at the end has matched one, and whatever follows is accepted (rule 6); "" is the same (rule 1).
        self.rest = not last
        self._elements = elements if self.rest else [*elements, last]
        star = text.find(b"*")
        self.literal = subject_of(text) if star < 0 and not self.rest else None
        self._prefix = text if star < 0 else text[:star]

    def element(self, depth: int) -> Element | None:
        """Return the element at a depth (from 0), `None` behind the last one."""
        if depth >= len(self._elements):
            return None
        wanted = self._elements[depth]
        fixed = wanted.rstrip(b"*")
        if fixed == wanted:
            return subject_of(wanted), True
        # An incomplete letter at the end is left out: the subject has a letter there, not its bytes.
        return make_decoder("surrogateescape").decode(fixed[:PREFIX_MAX]), False

    def matches(self, subject: str) -> bool:
        """Return whether the key of a subject matches."""
        key = key_of(subject)
        return key is not None and self.matches_key(key)

    def matches_key(self, key: bytes) -> bool:
        """Return whether a key matches."""
        if not key.startswith(self._prefix):
            return False
        wanted = self._elements
        count = len(wanted)
        if self.rest:
            # As many slashes as the pattern has must be there; the rest of the key need not be looked at.
            given = key.split(b"/", count)
            return len(given) > count and all(map(_fits, wanted, given))
        given = key.split(b"/", count)
        if len(given) != count:
            return False
        return all(map(_fits, wanted[:-1], given)) and _fits_last(wanted[-1], given[-1])


def _fits(wanted: bytes, given: bytes) -> bool:
    """Return whether an element with a `/` behind it matches: there a `*` may take nothing (rules 2, 3 and 4)."""
    if wanted == given:
        return True
    left = _common_length(wanted, given)
    rest = wanted[left:]
    return bool(rest) and not rest.strip(b"*")


def _fits_last(wanted: bytes, given: bytes) -> bool:
    """Return whether the last element matches: at the end of the key a `*` takes at least one byte (rules 3 and 5)."""
    if wanted == given:
        return True
    left = _common_length(wanted, given)
    return wanted[left:] == b"*" and len(given) > left


def _common_length(one: bytes, other: bytes) -> int:
    """Return how many bytes both begin with; in a few comparisons, for keys of 400 kB come from strangers too."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
