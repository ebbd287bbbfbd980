"""The connection as sessions of HTTP and WebSocket send through it."""

from collections.abc import Callable
from typing import Protocol


class Outbox(Protocol):
    """Answers of one connection, sent in order (`protocols.contract.Outbox`)."""

    bytes_max: int
    """Bound of what waits to be sent."""

    @property
    def full(self) -> bool:
        """Whether no more requests should be carried out for now."""

    @property
    def waiting(self) -> int:
        """Answers that are not written yet."""

    def answer(self, encode: Callable[[], bytes], weight: int = 0) -> None:
        """Send the bytes that `encode` returns, behind all earlier answers; `weight` of them count for the bound."""
