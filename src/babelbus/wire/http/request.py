"""A request as the server reads it, and runs of requests that are nearly the same (`runs.py`)."""

import msgspec

from babelbus.wire.http.target import split_target


class Request(msgspec.Struct, frozen=True):
    """One request. `target` is as sent, and it and the values of `headers` are Latin-1 (bytes as characters)."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""
    keep_alive: bool = True
    version: str = "1.1"

    @property
    def path(self) -> str:
        """The path of the target, not decoded."""
        return split_target(self.target)[0]

    @property
    def query(self) -> str:
        """The part of the target behind the `?`, not decoded."""
        return split_target(self.target)[1]


class RequestRun(msgspec.Struct, frozen=True, gc=False):
    """Requests that followed each other and are the same but for the value of one header and for the body.

    `request` is the part that the requests have in common: one object for all runs with the same head, so a caller can
    look it up by identity; it is read only. `values` are those of the header, as bytes; `None` without the header.
    """

    request: Request
    values: list[bytes] | None
    bodies: list[bytes]

    def requests(self, varying: str) -> list[Request]:
        """Return the requests one by one; `varying` is the header's name."""
        shared = self.request
        values = [None] * len(self.bodies) if self.values is None else self.values
        return [
            Request(
                shared.method,
                shared.target,
                dict(shared.headers) if value is None else {**shared.headers, varying: value.decode("latin-1")},
                body,
                shared.keep_alive,
                shared.version,
            )
            for value, body in zip(values, self.bodies, strict=True)
        ]
