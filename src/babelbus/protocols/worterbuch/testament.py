"""What is done when a client is gone: its grave goods and its last will (docs/specifications/worterbuch.md, 9.3)."""

from collections.abc import Sequence
from typing import Any

import msgspec

from babelbus.core.state import State, Testament, check_key, check_pattern, size_fault, store_pattern
from babelbus.protocols.worterbuch.names import SYS


class _Will(msgspec.Struct, frozen=True):
    key: str
    value: msgspec.Raw


def keep_testament(state: State, client_id: str, goods: Sequence[str], will: Sequence[tuple[str, bytes]]) -> None:
    """Keep what a client leaves behind; what is wrong or protected in it is left out."""
    bytes_max = state.key_bytes_max
    good = [one for one in goods if size_fault(one, bytes_max) is None and check_pattern(one) is None]
    kept = [one for one in will if size_fault(one[0], bytes_max) is None and check_key(one[0]) is None]
    patterns = tuple(map(store_pattern, good))
    entries = tuple((key, msgspec.Raw(value)) for key, value in kept)
    state.set_testament(client_id, Testament(patterns, entries))


def note_change(state: State, client_id: str, key: str) -> None:
    """Keep the testament when this key, which its client changed, is part of it; values of another shape are none."""
    path = f"{SYS}/clients/{client_id}/"
    if key.startswith(path) and key[len(path) :] in ("graveGoods", "lastWill"):
        goods = _read(state.find(f"{path}graveGoods"), list[str])
        will = _read(state.find(f"{path}lastWill"), list[_Will])
        keep_testament(state, client_id, goods or (), [(one.key, bytes(one.value)) for one in will or ()])


def _read(text: bytes | None, shape: Any) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=shape)
    except msgspec.DecodeError:
        return None
