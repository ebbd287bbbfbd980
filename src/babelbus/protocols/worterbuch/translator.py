"""Between one client and us: its requests in our keys and patterns, our messages as its dialect has them.

The profile decides how messages look (docs/specifications/worterbuch.md, 11 and 13), the symbols which characters keys
have.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from babelbus.core.access import Root
from babelbus.core.state import (
    ELEMENTS_MAX,
    Change,
    KeyPattern,
    PatternFault,
    check_key,
    check_parent_pattern,
    check_pattern,
    size_fault,
    store_pattern,
)
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.codec import (
    encode_error,
    encode_pstate,
    pstate_head,
    pstate_tail,
    state_head,
    state_tail,
)
from babelbus.protocols.worterbuch.errors import ErrorCode, RefusedError
from babelbus.protocols.worterbuch.names import Symbols
from babelbus.protocols.worterbuch.peer import DELETED, Subscriber
from babelbus.protocols.worterbuch.profiles import MAIN, Profile

PATTERN_CODES = {
    PatternFault.WILDCARD: ErrorCode.ILLEGAL_WILDCARD,
    PatternFault.MULTI_WILDCARD: ErrorCode.ILLEGAL_MULTI_WILDCARD,
    PatternFault.SECOND_MULTI_WILDCARD: ErrorCode.MULTI_WILDCARD_AT_ILLEGAL_POSITION,
}
"""Codes of the faults that the core finds in keys and patterns (docs/specifications/worterbuch.md, section 11)."""


class Translator:
    """The dialect of a client: a profile, which it may change, symbols, which stay, and the root of its principal."""

    def __init__(self, profile: Profile, symbols: Symbols, *, key_bytes_max: int) -> None:
        self.symbols = symbols
        self._key_bytes_max = key_bytes_max
        self.short = min(ELEMENTS_MAX, key_bytes_max // 4 + 1)
        """Keys with fewer characters are not too long, whatever the characters are."""
        self.root: Root | None = None
        self.usual = symbols.usual
        """Whether its keys are ours, character for character."""
        self.speak(profile)

    def speak(self, profile: Profile) -> None:
        """Continue in another dialect."""
        self.profile = profile
        self.native = profile is MAIN and self.usual
        """Whether it speaks as we do, so that there is nothing to translate."""

    def settle(self, root: Root | None) -> None:
        """Continue below a root: keys of the client are relative to it."""
        self.root = root
        self.usual = root is None and self.symbols.usual
        self.speak(self.profile)

    @property
    def form(self) -> str:
        """Clients of an equal form get the same text for the same change and subscription."""
        return f"{self.profile.name} {'' if self.usual else (self.symbols, self.root)}"

    # -- what the client says ----------------------------------------------------------------------------------------

    def read(self, message: m.ClientMessage) -> m.ClientMessage:
        """Return a request with its keys and patterns in our characters, and absolute.

        Raises:
            RefusedError: an element would have another meaning here.
        """
        changes: dict[str, Any] = {}
        for field in ("key", "pattern", "parent", "parent_pattern"):
            text = getattr(message, field, None)
            if text is not None:
                changes[field] = self._read_text(text)
        if self.root is not None:
            if isinstance(message, m.Ls | m.SubscribeLs):
                changes.setdefault("parent", self.root.name)
            elif isinstance(message, m.PLs):
                changes.setdefault("parent_pattern", self.root.name)
        if isinstance(message, m.Handshake):
            changes["last_will"] = tuple((self._read_text(key), value) for key, value in message.last_will)
            changes["grave_goods"] = tuple(map(self._read_text, message.grave_goods))
        return msgspec.structs.replace(message, **changes) if changes else message

    def _read_text(self, text: str) -> str:
        read = self.symbols.read(text)
        if read is None:
            raise RefusedError(ErrorCode.OTHER, f"'{text}' has an element that stands for something else here")
        return read if self.root is None else self.root.absolute(read)

    def _write_text(self, text: str) -> str | None:
        """Return a key or pattern as the client has it, `None` if its characters cannot express it."""
        return self.symbols.write(text if self.root is None else self.root.relative(text))

    def is_plain(self, key: str) -> bool:
        """Return whether a key needs no other check."""
        return len(key) < self.short and not ("?" in key or "#" in key or "$" in key or "!" in key)

    def check_key(self, key: str) -> None:
        """Check that a key is one.

        Raises:
            RefusedError: the key has a wildcard, or is too long.
        """
        self.check_size(key)
        fault = check_key(key)
        if fault is not None:
            code = ErrorCode.ILLEGAL_WILDCARD if self.profile.historic_wildcards else PATTERN_CODES[fault]
            raise RefusedError(code, f"'{key}' has a wildcard where a key is needed")

    def check_size(self, text: str | None) -> None:
        """Check that a key or pattern of which nothing else is asked is not too long.

        Raises:
            RefusedError: the text is too long.
        """
        fault = None if text is None else size_fault(text, self._key_bytes_max)
        if text is not None and fault is not None:
            raise RefusedError(ErrorCode.OTHER, f"'{text[:80]}...' {fault}")

    def read_pattern(self, text: str) -> KeyPattern:
        """Return what the store is asked for a pattern.

        Raises:
            RefusedError: the text is no pattern.
        """
        self.check_size(text)
        fault = check_pattern(text, historic=self.profile.historic_wildcards)
        if fault is not None:
            raise RefusedError(PATTERN_CODES[fault], f"'{text}' has # before its end")
        return store_pattern(text)

    def read_parent_pattern(self, text: str) -> KeyPattern:
        """Return what the store is asked for a pattern of parents.

        Raises:
            RefusedError: the text is no pattern.
        """
        self.check_size(text)
        fault = check_parent_pattern(text)
        if fault is not None:
            raise RefusedError(PATTERN_CODES[fault], f"'{text}' has #")
        return store_pattern(text)

    # -- what the client is told -------------------------------------------------------------------------------------

    def write_pattern(self, pattern: str) -> str:
        """Return back what `read` made of a pattern: exactly what the client sent."""
        return self._write_text(pattern) or pattern

    def write_pair_key(self, key: str) -> str | None:
        """Return what stands beside the value in `state`, in the profiles that have it."""
        return self._write_text(key) if self.profile.pairs else None

    def write_pairs(self, pairs: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """Return pairs with the keys of the client, without pairs whose keys its characters cannot express."""
        if self.usual:
            return pairs
        return [(written, value) for key, value in pairs if (written := self._write_text(key)) is not None]

    def encode_error(self, transaction_id: int, code: ErrorCode, text: str) -> bytes:
        """Return the error that answers a request, with a code that the client knows."""
        text = text if self.root is None else self.root.relative_text(text)
        return encode_error(transaction_id, self.profile.error_code(code), text)

    def encode_run(self, subscriber: Subscriber, changes: Sequence[Change]) -> list[bytes]:
        """Return the messages that a run of changes is for a subscriber, one each."""
        profile = self.profile
        if not profile.deletions:
            changes = [change for change in changes if change[0] is not DELETED]
        if not self.usual:
            write = self._write_text
            changes = [(kind, write(key or ""), value, before, n) for kind, key, value, before, n in changes]
            changes = [change for change in changes if change[1] is not None]
        if subscriber.pattern is None:
            head = state_head(subscriber.transaction_id)
            pairs = profile.pairs
            return [
                head + state_tail(value, key if pairs else None, deleted=kind is DELETED)
                for kind, key, value, _, _ in changes
            ]
        head = pstate_head(subscriber.transaction_id, subscriber.pattern)
        return [head + pstate_tail([(key or "", value)], deleted=kind is DELETED) for kind, key, value, _, _ in changes]

    def encode_collected(self, subscriber: Subscriber, changes: Sequence[Change]) -> bytes:
        """Return one message with changes of one kind for a subscriber of a pattern, no bytes without a message."""
        assert subscriber.pattern is not None
        deleted = changes[0][0] is DELETED
        pairs = self.write_pairs([(key or "", value) for _, key, value, _, _ in changes])
        if not pairs or (deleted and not self.profile.deletions):
            return b""
        return encode_pstate(subscriber.transaction_id, subscriber.pattern, pairs, deleted=deleted)
