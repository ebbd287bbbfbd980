"""Which web pages may read answers in a browser: the headers of CORS (https://fetch.spec.whatwg.org, 3.2)."""

from collections.abc import Mapping
from typing import Final

import msgspec

from babelbus.wire.browsers import ANY_ORIGIN
from babelbus.wire.http import TOKEN

ANY: Final = "*"
PREFLIGHT_SECONDS = 600
"""How long a browser may remember the answer to a preflight."""
ASKED_LENGTH_MAX = 4096
OURS = frozenset({"access-control-allow-origin", "access-control-expose-headers", "access-control-allow-credentials"})
"""Headers that services may not answer with where the operator lists origins: browsers take each header once."""

Headers = list[tuple[str, str]]


class Cors(msgspec.Struct, frozen=True):
    """The pages that an operator lets read, and how."""

    origins: frozenset[str]
    """Scheme, host and port of each, or `*` for any."""
    methods: str
    """Names of the methods that pages may use, with commas between."""
    headers: str
    """Names of the headers that pages may send, with commas between; `*` for any."""
    exposed: str = ""
    """Names of the headers that pages may read; `*` for any."""
    credentials: bool = False
    """Whether browsers send cookies along."""

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Return whether a browser asks if a page may ask; such a request proves nothing, for it cannot."""
        return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers

    def preflight_headers(self, headers: Mapping[str, str]) -> Headers:
        """Return what the answer to a preflight has beside `answer_headers`."""
        if not self._allows(headers):
            return []
        asked = headers.get("access-control-request-headers", "")
        allowed = self.headers
        if allowed == ANY and asked and len(asked) <= ASKED_LENGTH_MAX:
            # Older browsers take no `*` here.
            names = [name.strip() for name in asked.split(",")]
            allowed = ", ".join(name for name in names if TOKEN.fullmatch(name)) or ANY
        return [
            ("access-control-allow-methods", self.methods),
            ("access-control-allow-headers", allowed),
            ("access-control-max-age", str(PREFLIGHT_SECONDS)),
        ]

    def answer_headers(self, headers: Mapping[str, str], *, exposes: bool = True) -> Headers:
        """Return what every answer has; `exposes` is false for preflights."""
        added: Headers = []
        if self._allows(headers):
            origin = ANY_ORIGIN if ANY_ORIGIN in self.origins else headers["origin"]
            added.append(("access-control-allow-origin", origin))
            if self.credentials:
                added.append(("access-control-allow-credentials", "true"))
            if self.exposed and exposes:
                added.append(("access-control-expose-headers", self.exposed))
        if ANY_ORIGIN not in self.origins:
            added.append(("vary", "origin"))  # caches must not give the answer for one page to another
        return added

    def _allows(self, headers: Mapping[str, str]) -> bool:
        origin = headers.get("origin")
        return origin is not None and (ANY_ORIGIN in self.origins or origin in self.origins)
