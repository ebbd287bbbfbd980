"""The requests of browsers that an HTTP listener carries out (docs/security.md, "Browsers").

Any web page that a user opens can send requests to the machine of the user and to its network, also to loopback. The
page needs no answer to do harm, and a name that is bound to our address later (DNS rebinding) lets it read the answer.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

import msgspec

ANY_ORIGIN: Final = "*"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ACCEPTED_MAX: Final = 64
"""Most values of `Host` that are remembered: clients choose the ports in them."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/?#@\s]+)(?::[0-9]{0,5})?")
_PAGE = re.compile(r"(https?)://([^/?#@\s]+)(?![^/?#])")
# Media players of browsers send a name of their own. Tools send other names; Node's fetch sends `sec-fetch-mode`, so
# that header marks no browser.
_AGENTS = ("Mozilla/", "Opera/", "AppleCoreMedia/", "stagefright/")


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is refused, as the answer says it. `reason` is a label of metrics."""

    reason: Literal["host", "origin", "change"]
    status: int
    text: str

    @property
    def allows_reading(self) -> bool:
        """Whether the request may be carried out if it changes nothing and calls no service."""
        return self.reason == "change"


_NO_CHANGE = Refusal(
    "change",
    403,
    "refused: a browser may only read here, unless a page of this server or of server.allowed_origins asks; "
    "a program that is no browser must send no User-Agent or Referer of a browser",
)
_NO_HOST = Refusal("host", 421, "refused: a browser must send the header Host")


class BrowserGuard:
    """Checks the heads of all requests to one listener.

    Args:
        hosts: names of the server in lower case; `localhost`, names below it and IP addresses are always accepted,
            because they cannot be bound to another address.
        origins: origins of pages that may do everything, in lower case; `*` is every page.
        is_tls: whether the listener itself speaks TLS: then a page of the same host without TLS is another origin.
        on_refused: is called with each refusal that the listener answers.
    """

    def __init__(
        self,
        *,
        hosts: Iterable[str] = (),
        origins: frozenset[str] = frozenset(),
        is_tls: bool = False,
        on_refused: Callable[[Refusal], None] | None = None,
    ) -> None:
        self.refused: Callable[[Refusal], None] = on_refused or (lambda _: None)
        self._hosts = frozenset(hosts) | {"localhost"}
        self._origins = origins
        self._is_tls = is_tls
        self._accepted: set[str] = set()

    def check(self, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is refused; `None` if it may do everything.

        The caller answers it, unless the refusal allows reading and the request only reads. The names of `headers`
        are in lower case, their values as they were sent.
        """
        host = headers.get("host")
        if host not in self._accepted:
            if host is None:  # HTTP/1.0
                return _NO_HOST if is_marked(headers) else None
            if not self._accepts(host):
                return Refusal(
                    "host",
                    421,
                    f"refused: this server has no name {host[:80]!r}; if it should, add the name to server.host_names",
                )
        return self._check_page(headers, host) if is_marked(headers) else None

    def _accepts(self, host: str) -> bool:
        """Return whether a value of `Host` names this server, and remember the value if so."""
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1].removesuffix(".")
        if name not in self._hosts and not name.endswith(".localhost") and not _is_address(name):
            return False
        if len(self._accepted) >= ACCEPTED_MAX:
            self._accepted.clear()
        self._accepted.add(host)
        return True

    def _check_page(self, headers: Mapping[str, str], host: str) -> Refusal | None:
        origin = headers.get("origin")
        if origin is not None:
            if ANY_ORIGIN in self._origins or origin.lower() in self._origins:
                return None
            if self._is_own(_PAGE.fullmatch(origin.lower()), host, headers):
                return None
            return Refusal(
                "origin",
                403,
                f"refused: pages of {origin[:80]!r} may not use this server; if they should, add the origin to "
                "server.allowed_origins",
            )
        # A request without Origin is an image, a script, a link or the like, which any page can request.
        site = headers.get("sec-fetch-site")
        if site is not None:
            return None if site == "same-origin" else _NO_CHANGE
        # Browsers send no Sec-Fetch-Site to plain HTTP beyond loopback. A page can hide its Referer, not forge it.
        page = _PAGE.match(headers.get("referer", "").lower())
        return None if self._is_own(page, host, headers) else _NO_CHANGE

    def _is_own(self, page: re.Match[str] | None, host: str, headers: Mapping[str, str]) -> bool:
        """Return whether a page has the same origin as its request.

        The scheme counts when it is known: behind a proxy that ends TLS, it is not. Old Python clients send `http` in
        the Origin of a WebSocket with TLS; they are no browsers.
        """
        if page is None or page[2] != host.lower():
            return False
        return not self._is_tls or page[1] == "https" or not headers.get("user-agent", "").startswith(_AGENTS)


def is_marked(headers: Mapping[str, str]) -> bool:
    """Return whether a request comes from a browser, or has the headers of one."""
    return (
        "origin" in headers
        or "sec-fetch-site" in headers
        or "referer" in headers
        or headers.get("user-agent", "").startswith(_AGENTS)
    )


def _is_address(name: str) -> bool:
    """Return whether a name is an IP address: browsers never look an address up, so it cannot be bound to another."""
    try:
        ipaddress.ip_address(name[1:-1] if name[:1] == "[" else name)
    except ValueError:
        return False
    return True
