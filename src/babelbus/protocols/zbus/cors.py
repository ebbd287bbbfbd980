"""Which web pages may use the port from a browser (docs/specifications/zbus.md, 6.4 and 8: what R3 has as `cors`)."""

import msgspec

from babelbus.wire.http import TOKEN, Request

ANY = "*"
PREFLIGHT_SECONDS = 600
"""How long a browser may remember what it was told."""
ASKED_LENGTH_MAX = 4096
OURS = frozenset({"access-control-allow-origin", "access-control-expose-headers", "access-control-allow-credentials"})
"""Headers that services may not answer with where the operator has said who may: browsers take no two of them."""


class Cors(msgspec.Struct, frozen=True):
    """What the operator has said. Cookies are never asked for: pages prove nothing with them here."""

    origins: frozenset[str]
    """Scheme, host and port of each, or `*` for any."""
    methods: str
    headers: str
    """Names of the headers that pages may send, with commas between; `*` for any."""
    exposed: str
    """Names of those that they may read; `*` for any."""

    def is_preflight(self, request: Request) -> bool:
        """Return whether a browser asks if it may ask; it proves nothing, for it cannot."""
        headers = request.headers
        return request.method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers

    def preflight_headers(self, request: Request) -> list[tuple[str, str]]:
        """Return the headers of the answer to a preflight, which has no body."""
        allowed = self._allowed(request)
        if not allowed:
            return self._vary()
        asked = request.headers.get("access-control-request-headers", "")
        headers = self.headers
        if headers == ANY and asked and len(asked) <= ASKED_LENGTH_MAX:
            # Older browsers take no `*` here.
            names = [name.strip() for name in asked.split(",")]
            headers = ", ".join(name for name in names if TOKEN.fullmatch(name)) or ANY
        return [
            *allowed,
            ("access-control-allow-methods", self.methods),
            ("access-control-allow-headers", headers),
            ("access-control-max-age", str(PREFLIGHT_SECONDS)),
            *self._vary(),
        ]

    def answer_headers(self, request: Request) -> list[tuple[str, str]]:
        """Return what is added to any other answer."""
        allowed = self._allowed(request)
        if allowed and self.exposed:
            allowed.append(("access-control-expose-headers", self.exposed))
        return [*allowed, *self._vary()]

    def _allowed(self, request: Request) -> list[tuple[str, str]]:
        origin = request.headers.get("origin")
        if origin is None:
            return []
        if ANY in self.origins:
            return [("access-control-allow-origin", ANY)]
        return [("access-control-allow-origin", origin)] if origin in self.origins else []

    def _vary(self) -> list[tuple[str, str]]:
        """Caches must not give the answer for one page to another."""
        return [] if ANY in self.origins else [("vary", "origin")]
