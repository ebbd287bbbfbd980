"""The testament of a client: its grave goods and its last will (docs/specifications/worterbuch.md, 9.3)."""

from collections.abc import Sequence

import msgspec

from babelbus.core.state import State, Testament, check_key, check_pattern, size_fault, store_pattern
from babelbus.core.subject import is_secret
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.errors import ErrorCode, RefusedError
from babelbus.protocols.worterbuch.names import SYS, is_below_sys

GRAVE_GOODS = "graveGoods"
LAST_WILL = "lastWill"
ENTRIES_MAX = 10_000
"""Most patterns and values of one testament."""


class _Will(msgspec.Struct, frozen=True):
    key: str
    value: msgspec.Raw


_read_goods = msgspec.json.Decoder(list[str]).decode
_read_will = msgspec.json.Decoder(list[_Will]).decode


def read_testament(
    access: Access, goods: Sequence[str], will: Sequence[tuple[str, bytes]], *, key_bytes_max: int
) -> Testament:
    """Return a testament, without patterns and keys that are invalid or that no client writes.

    Raises:
        RefusedError: it is too long, or the token of the client lacks a privilege.
        AccessRefusedError: the table of access does not grant it.
    """
    _check_count(goods, will)
    goods, will = _valid_goods(goods, key_bytes_max), _valid_will(will, key_bytes_max)
    access.check_testament(goods, [key for key, _ in will])
    return _testament(goods, will)


def read_part(state: State, access: Access, client_id: str, key: str, value: bytes | None) -> Testament | None:
    """Return the testament of a client that sets this key, or deletes it; `None` if the key is no part of it.

    Raises:
        RefusedError: the value has another shape or is too long, or the token of the client lacks a privilege.
        AccessRefusedError: the table of access does not grant it.
    """
    part = _part_of(client_id, key)
    if part is None:
        return None
    path, bytes_max = f"{SYS}/clients/{client_id}", state.key_bytes_max
    texts = {name: state.find(f"{path}/{name}") or b"[]" for name in (GRAVE_GOODS, LAST_WILL)}
    texts[part] = b"[]" if value is None else value
    try:
        patterns, values = _read_goods(texts[GRAVE_GOODS]), _read_will(texts[LAST_WILL])
    except msgspec.DecodeError as error:
        raise RefusedError(ErrorCode.IO_ERROR, f"'{key}': {error}") from None
    _check_count(patterns, values)
    absolute = access.identity.absolute
    goods = _valid_goods([absolute(text) for text in patterns], bytes_max)
    entries = [(absolute(entry.key), bytes(entry.value)) for entry in values]
    will = _valid_will(entries, bytes_max)
    if part == GRAVE_GOODS:
        access.check_testament(goods, ())
    else:
        access.check_testament((), [key for key, _ in will])
    return _testament(goods, will)


def _check_count(goods: Sequence[str], will: Sequence[object]) -> None:
    """Check that a testament does not hold up others when it is executed.

    Raises:
        RefusedError: it has too many patterns and values.
    """
    count = len(goods) + len(will)
    if count > ENTRIES_MAX:
        raise RefusedError(ErrorCode.OTHER, f"{count:,} grave goods and last wills, {ENTRIES_MAX:,} are possible")


def _testament(goods: Sequence[str], will: Sequence[tuple[str, bytes]]) -> Testament:
    return Testament(tuple(map(store_pattern, goods)), tuple((key, msgspec.Raw(value)) for key, value in will))


def _valid_goods(goods: Sequence[str], bytes_max: int) -> list[str]:
    return [text for text in goods if _is_valid(text, bytes_max) and check_pattern(text) is None]


def _valid_will(will: Sequence[tuple[str, bytes]], bytes_max: int) -> list[tuple[str, bytes]]:
    return [(key, value) for key, value in will if _is_valid(key, bytes_max) and check_key(key) is None]


def _is_valid(text: str, bytes_max: int) -> bool:
    return size_fault(text, bytes_max) is None and not is_below_sys(text) and not is_secret(text)


def _part_of(client_id: str, key: str) -> str | None:
    path, _, part = key.rpartition("/")
    return part if part in (GRAVE_GOODS, LAST_WILL) and path == f"{SYS}/clients/{client_id}" else None
