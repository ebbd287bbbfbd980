"""The way of a pipeline to the bus: options that every source and sink on it gets, unless it has its own."""

from collections.abc import Callable

import msgspec

_OF_SERVERS = frozenset({"groupid", "kafka.group.id"})
"""Options that only a server understands: with one of them a data folder is not read in place."""
WAYS = frozenset({"path", "url", "servers", "bootstrap.servers", "kafka.bootstrap.servers"})
_NAMES = {"url": "url", "path": "path", "identity": "identity", "fingerprint": "serverFingerprint"}


def _unknown(topic: str) -> bool | None:
    return None


class Bus(msgspec.Struct, frozen=True):
    """A server (`url`, `identity`: the path of a key file, `fingerprint`) or a data folder (`path`)."""

    url: str = ""
    path: str = ""
    identity: str = ""
    fingerprint: str = ""
    keeps_state: Callable[[str], bool | None] = _unknown
    """Returns whether what is published to a topic becomes state; `None` if that is not known."""

    def __bool__(self) -> bool:
        return bool(self.url or self.path)

    def options(self, own: dict[str, str], *, writing: bool = False) -> dict[str, str]:
        """Return the options of a source or sink that has `own` ones. Nothing is written through a data folder."""
        if WAYS & {name.lower() for name in own}:
            return own
        by_server = writing or not self.path or (self.url and _OF_SERVERS & {name.lower() for name in own})
        names = ("url", "identity", "fingerprint") if by_server else ("path",)
        given = {_NAMES[name]: getattr(self, name) for name in names if getattr(self, name)}
        return given | own
