"""A part of a JSON value, as a JSON pointer names it (RFC 6901)."""

import re

import msgspec

from babelbus.errors import BabelbusError

_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")
_BAD_ESCAPE = re.compile(r"~(?![01])")
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class InvalidPointerError(BabelbusError):
    """A text that is no JSON pointer."""


def find_part(value: bytes, pointer: str) -> bytes | None:
    """Return the JSON text of the part that a pointer names, exactly as it stands there; `None` if there is none.

    Raises:
        InvalidPointerError: it is no pointer.
    """
    if not pointer:
        return value
    if pointer[0] != "/" or _BAD_ESCAPE.search(pointer):
        raise InvalidPointerError(f"no JSON pointer: '{pointer}'")
    for token in pointer[1:].split("/"):
        first = value.lstrip()[:1]
        if first == b"{":
            part = _members(value).get(token.replace("~1", "/").replace("~0", "~"))
        elif first == b"[" and _INDEX.fullmatch(token):
            items = _items(value)
            index = int(token)
            part = items[index] if index < len(items) else None
        else:
            part = None
        if part is None:
            return None
        value = bytes(part)
    return value.strip()
