"""The publication that a connection makes again and again, one request at a time.

A client that waits for each answer sends one request a read, and what that costs is paid for each message. So what
does not change between two of them is worked out once.
"""

from collections.abc import Callable

from babelbus.errors import BabelbusError
from babelbus.protocols.zbus.messages import BodyKind
from babelbus.protocols.zbus.stored import Mould
from babelbus.wire.http import Request


class Repeat:
    """What the publications of one connection have in common that come with requests like `request`."""

    __slots__ = ("_after", "_before", "_refuse", "head", "kind", "mould", "mq", "request", "size", "weight")

    def __init__(
        self,
        request: Request,
        mq: str,
        mould: Mould,
        kind: BodyKind,
        answer: tuple[bytes, bytes],
        refuse: Callable[[bytes, BabelbusError, Request], bytes],
    ) -> None:
        self.request = request
        self.mq = mq
        self.mould = mould
        self.kind = kind
        self._before, self._after = answer
        self._refuse = refuse
        self.weight = len(self._before) + len(self._after)
        self.head = b""
        self.size = -1
        """How the last one began, if its head has no id, and how long it was with its body."""

    def takes(self, body: bytes) -> bool:
        """Return whether a body is one of this kind as it stands."""
        return bool(body) and (self.kind == "bytes" or body.isascii())

    def remember(self, data: bytes, body: bytes) -> None:
        """Know this one by heart, which has no id: the next one may have the same head."""
        self.head = data[: len(data) - len(body)]
        self.size = len(data)

    def reply(self, request_id: bytes, error: BabelbusError | None) -> bytes:
        """Return the answer to one of them."""
        if error is not None:
            return self._refuse(request_id, error, self.request)
        return b"%b%b%b" % (self._before, request_id, self._after)
