"""A request as the server reads it, and many of them that are nearly the same (`http_runs.py`)."""

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
        """What stands behind the `?` of the target, not decoded."""
        return split_target(self.target)[1]


class RequestRun(msgspec.Struct, frozen=True, gc=False):
    """Requests that followed each other and are the same but for the value of one header and for the body.

    `request` is what they have in common; it stands for as many runs as there are of it, so it can be looked up by
    being the same object, and it is read only. `values` are those of the header, as bytes; `None` when it is not there.
    """

    request: Request
    values: list[bytes] | None
    bodies: list[bytes]

    def requests(self, varying: str) -> list[Request]:
        """Return them one by one; `varying` is the header's name."""
        one = self.request
        values = [None] * len(self.bodies) if self.values is None else self.values
        return [
            Request(
                one.method,
                one.target,
                dict(one.headers) if value is None else {**one.headers, varying: value.decode("latin-1")},
                body,
                one.keep_alive,
                one.version,
            )
            for value, body in zip(values, self.bodies, strict=True)
        ]
