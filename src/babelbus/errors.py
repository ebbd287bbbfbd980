"""The one exception tree: everything that Babelbus raises on purpose is a `BabelbusError`.

Each layer defines its own errors beside the code that raises them; this module has the branches that several layers
use.
"""

import re
from typing import ClassVar, Final, TypeVar

import msgspec

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder of msgspec that reads the bytes of others."""


class BabelbusError(Exception):
    """The root: catch this to catch every error that Babelbus raises on purpose."""

    retriable: ClassVar[bool] = False
    """Whether the same request may succeed later, without anybody changing the request."""


class ConfigError(BabelbusError):
    """A setting is missing or has a wrong value; the message names the key."""


# The part of a path above a file of a data folder, and above a database of SQLite.
_ABOVE = re.compile(r"(?<![^\s'\"(])/(?:[^\n]*?/)?(?=(?:topics|state|staging|conf)/|groups\.|db\.sqlite)")
_ABOVE_SQLITE = re.compile(r"(?<=sqlite:///)/?(?:[^\s/]+/)*")


class StorageError(BabelbusError):
    """The store refused an operation or could not finish it.

    The text goes to clients too, so it names a file as it is called in the data folder, and not where the folder is.
    """

    retriable = True

    def __init__(self, text: str = "") -> None:
        super().__init__(_ABOVE_SQLITE.sub("", _ABOVE.sub("", text)))


class RemoteProtocolError(BabelbusError):
    """The peer broke the protocol; its connection is closed."""


class LocalProtocolError(BabelbusError):
    """Our own side requested something that the protocol cannot express; nothing was sent."""


class InvalidTopicNameError(BabelbusError):
    """A topic cannot have this name; the message says why."""

    retriable = False


class PeerLeavesError(BabelbusError):
    """The peer ends the connection in good order: close when everything that was written is sent."""


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Return an error, and drop the frames that it and its causes went through.

    An object that keeps an error is often in such a frame, and so are the bytes of the peer: a reference cycle.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
