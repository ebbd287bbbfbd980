"""A browser that is logged in at the console, as far as the server sees it: a cookie and the headers of a page."""

import contextlib
import http.client
import json
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

from tests.support.bus import SAFETY_NET_SECONDS

PAGE = {"X-Babelbus-Console": "1", "Sec-Fetch-Site": "same-origin"}
"""Headers that a page of the console sends with each request, with its `Origin` where something changes."""


class Told(NamedTuple):
    """An answer."""

    status: int
    body: Any
    headers: http.client.HTTPMessage

    @property
    def code(self) -> str:
        """The word of an error."""
        return str(self.body["code"])


class Browser:
    """One browser with its cookies; `address` is "host:port" of the administration endpoint."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.cookie: str | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _send(
        self, method: str, path: str, body: object, headers: dict[str, str] | None, query: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, timeout=SAFETY_NET_SECONDS)
        self._stack.enter_context(contextlib.closing(connection))
        sent = PAGE if headers is None else headers
        if self.cookie is not None and "Cookie" not in sent:
            sent = sent | {"Cookie": self.cookie}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        target = f"{path}?{urlencode(query)}" if query else path
        connection.request(method, target, data, sent)
        self._connection = connection
        return connection.getresponse()

    def ask(
        self, method: str, path: str, body: object = None, *, headers: dict[str, str] | None = None, **query: str
    ) -> Told:
        """Send a request; `headers` replace those of a page."""
        with contextlib.closing(self._send(method, path, body, headers, query)) as response:
            text = response.read()
            kept = response.headers.get("Set-Cookie")
            if kept is not None:
                name, _, value = kept.partition(";")[0].partition("=")
                self.cookie = f"{name}={value}" if value.strip('"') else None
            is_json = response.headers.get("Content-Type", "").startswith("application/json")
            told = Told(response.status, json.loads(text) if is_json else text, response.headers)
        self._connection.close()
        return told

    def open(self, method: str, path: str, **query: str) -> http.client.HTTPResponse:
        """Send a request, and return its answer as it begins."""
        return self._stack.enter_context(contextlib.closing(self._send(method, path, None, None, query)))

    def log_in(self, **proof: str) -> Told:
        """Log in with a token, a user and a password, or a code."""
        return self.ask("POST", "/api/console/login", proof)

    def log_out(self) -> Told:
        """Log out; the cookie stays as it was, for who keeps it."""
        kept = self.cookie
        told = self.ask("POST", "/api/console/logout")
        self.cookie = kept
        return told
