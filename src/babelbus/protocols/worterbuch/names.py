"""The names of keys: those below `$SYS`, and the characters that operators of servers 0.30 to 0.34 could choose.

The seed document lets separator and wildcards be any ASCII character. Inside, keys always are as in `patterns`: keys
of requests are translated, and keys of messages; a key that the client's characters cannot express has no translation.
"""

import msgspec

from babelbus.core.state import MULTI_WILDCARD, SEPARATOR, WILDCARD, KeyPattern
from babelbus.core.subject import is_secret
from babelbus.protocols.worterbuch.errors import ErrorCode, RefusedError

SYS = "$SYS"
"""The server itself sets the keys below it (docs/specifications/worterbuch.md, 9)."""


def is_below_sys(key: str) -> bool:
    """Return whether a key is `$SYS` or below it."""
    return key.startswith(SYS) and key[len(SYS) : len(SYS) + 1] in ("", SEPARATOR)


_SHOWING_KEYS = frozenset(("graveGoods", "lastWill", "narrowed", "subscriptions"))
"""Begin the keys below `$SYS/clients/ID` whose names or values are keys and patterns."""


def shows_keys(key: str) -> bool:
    """Return whether a key below `$SYS` shows what clients lock, subscribe to, or leave behind."""
    if not key.startswith(SYS):
        return False
    match key.split(SEPARATOR, 4):
        case ["$SYS", "locks", *_]:
            return True
        case ["$SYS", "clients", _, name, *_]:
            return name in _SHOWING_KEYS
    return False


def may_be_secret(pattern: KeyPattern) -> bool:
    """Return whether a pattern may match secret keys."""
    return not pattern.elements or pattern.elements[0] in (None, "!")


def check_writable(key: str) -> None:
    """Check that clients may write a key, or the keys of a pattern.

    Raises:
        RefusedError: the key is the server's own, or secret.
    """
    if is_below_sys(key) or is_secret(key):
        raise RefusedError(ErrorCode.READ_ONLY_KEY, f"'{key}' is read-only")


class Symbols(msgspec.Struct, frozen=True):
    """Separator, wildcard for one element and wildcard for several: three different ASCII characters.

    Raises:
        ValueError: they are not.
    """

    separator: str = SEPARATOR
    wildcard: str = WILDCARD
    multi_wildcard: str = MULTI_WILDCARD

    def __post_init__(self) -> None:
        chosen = (self.separator, self.wildcard, self.multi_wildcard)
        if len(set(chosen)) < 3 or not all(len(one) == 1 and one.isascii() and one.isprintable() for one in chosen):
            raise ValueError(f"separator and wildcards are three different printable ASCII characters, not {chosen}")

    @property
    def usual(self) -> bool:
        """Whether there is nothing to translate."""
        return self == USUAL

    def read(self, text: str) -> str | None:
        """Return a client's key or pattern in our characters, `None` if an element would read as something else."""
        return _translate(text, self, USUAL)

    def write(self, key: str) -> str | None:
        """Return one of our keys or patterns in the client's characters, `None` if they cannot express it."""
        return _translate(key, USUAL, self)


USUAL = Symbols()


def _translate(text: str, source: Symbols, target: Symbols) -> str | None:
    if source == target:
        return text
    wildcards = {source.wildcard: target.wildcard, source.multi_wildcard: target.multi_wildcard}
    elements = []
    for element in text.split(source.separator):
        if element in wildcards:
            elements.append(wildcards[element])
        elif target.separator in element or element in (target.wildcard, target.multi_wildcard):
            return None
        else:
            elements.append(element)
    return target.separator.join(elements)
