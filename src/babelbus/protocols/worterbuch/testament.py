"""The testament of a client: its grave goods and its last will (docs/specifications/worterbuch.md, 9.3)."""

from collections.abc import Sequence

import msgspec

from babelbus.core.state import State, Testament, check_key, check_pattern, size_fault, store_pattern
from babelbus.protocols.worterbuch.errors import ErrorCode, RefusedError
from babelbus.protocols.worterbuch.names import SYS

GRAVE_GOODS = "graveGoods"
LAST_WILL = "lastWill"


class _Will(msgspec.Struct, frozen=True):
    key: str
    value: msgspec.Raw


_read_goods = msgspec.json.Decoder(list[str]).decode
_read_will = msgspec.json.Decoder(list[_Will]).decode


def keep_testament(state: State, client_id: str, goods: Sequence[str], will: Sequence[tuple[str, bytes]]) -> None:
    """Keep the testament of a client, without patterns and keys that are invalid."""
    bytes_max = state.key_bytes_max
    patterns = tuple(
        store_pattern(pattern)
        for pattern in goods
        if size_fault(pattern, bytes_max) is None and check_pattern(pattern) is None
    )
    entries = tuple(
        (key, msgspec.Raw(value))
        for key, value in will
        if size_fault(key, bytes_max) is None and check_key(key) is None
    )
    state.set_testament(client_id, Testament(patterns, entries))


def check_testament(client_id: str, key: str, value: bytes) -> None:
    """Check that the value of a key is a testament if the key is that of a testament.

    Raises:
        RefusedError: the value has another shape.
    """
    part = _part_of(client_id, key)
    try:
        if part == GRAVE_GOODS:
            _read_goods(value)
        elif part == LAST_WILL:
            _read_will(value)
    except msgspec.DecodeError as error:
        raise RefusedError(ErrorCode.IO_ERROR, f"'{key}': {error}") from None


def note_change(state: State, client_id: str, key: str) -> None:
    """Keep the testament when this key, which its client changed, is part of it."""
    if _part_of(client_id, key) is not None:
        path = f"{SYS}/clients/{client_id}"
        goods = _read_goods(state.find(f"{path}/{GRAVE_GOODS}") or b"[]")
        will = _read_will(state.find(f"{path}/{LAST_WILL}") or b"[]")
        keep_testament(state, client_id, goods, [(entry.key, bytes(entry.value)) for entry in will])


def _part_of(client_id: str, key: str) -> str | None:
    path, _, part = key.rpartition("/")
    return part if part in (GRAVE_GOODS, LAST_WILL) and path == f"{SYS}/clients/{client_id}" else None
