"""Errors of zbus peers: each has the status and the text of its answer (docs/specifications/zbus.md, section 3)."""

from babelbus.errors import BabelbusError


class RequestError(BabelbusError):
    """A request that is answered with `status` and `text`; the connection stays."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text}")
        self.status = status
        self.text = text


class MalformedMessageError(RequestError):
    """The data is not a message of the protocol: 400."""

    def __init__(self, text: str) -> None:
        super().__init__(400, text)


class AuthenticationError(RequestError):
    """A message does not prove who sent it, or a browser asks for more than a page may: 403 (section 7)."""

    def __init__(self, text: str) -> None:
        super().__init__(403, text)


class NotFoundError(RequestError):
    """There is no such MQ, channel, command, url or target: 404."""

    def __init__(self, text: str) -> None:
        super().__init__(404, text)


class UnsendableMessageError(RequestError):
    """A message cannot be said in the encoding of its receiver, who gets a 500 in its place."""

    def __init__(self, text: str) -> None:
        super().__init__(500, text)
