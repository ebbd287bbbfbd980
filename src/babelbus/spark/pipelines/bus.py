"""How a pipeline reaches the bus: options that every source and sink on it gets, unless it has its own."""

import msgspec

WAYS = frozenset({"path", "url", "servers", "bootstrap.servers", "kafka.bootstrap.servers"})
_NAMES = {"url": "url", "path": "path", "identity": "identity", "fingerprint": "serverFingerprint"}


class Bus(msgspec.Struct, frozen=True):
    """A server (`url`, `identity`: the path of a key file, `fingerprint`) or a data folder (`path`)."""

    url: str = ""
    path: str = ""
    identity: str = ""
    fingerprint: str = ""

    def __bool__(self) -> bool:
        return bool(self.url or self.path)

    def options(self, own: dict[str, str], *, writing: bool = False) -> dict[str, str]:
        """Give the options of a source or sink that has `own` ones. Nothing is written through a data folder."""
        if WAYS & {name.lower() for name in own}:
            return own
        names = ("url", "identity", "fingerprint") if writing or not self.path else ("path",)
        given = {_NAMES[name]: getattr(self, name) for name in names if getattr(self, name)}
        return given | own
