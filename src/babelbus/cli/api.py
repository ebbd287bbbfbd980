"""The administration API as the command line uses it (docs/operations.md, "Administration endpoint")."""

import http.client
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from babelbus.cli.command import CommandError

TIMEOUT_SECONDS = 30.0


class ApiError(CommandError):
    """The server refused; `code` is the word of its answer (`unknown_topic`, `topic_exists`, ...)."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AdminApi:
    """One server's API. Every method may raise `ApiError`, or `CommandError` when nothing answers."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._token = token

    def topics(self) -> list[dict[str, Any]]:
        """Give all topics."""
        found: list[dict[str, Any]] = self._ask("GET", "/api/topics")["topics"]
        return found

    def topic(self, name: str) -> dict[str, Any]:
        """Give one topic."""
        return self._ask("GET", _path(name))

    def create_topic(self, name: str, partitions: int | None, settings: Mapping[str, object]) -> dict[str, Any]:
        """Make a topic, and give it."""
        body: dict[str, object] = {"name": name, "settings": dict(settings)}
        if partitions is not None:
            body["partitions"] = partitions
        return self._ask("POST", "/api/topics", body)

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> dict[str, Any]:
        """Change a topic, and give it."""
        return self._ask("PATCH", _path(name), dict(changes))

    def remove_topic(self, name: str) -> None:
        """Remove a topic and its records."""
        self._ask("DELETE", _path(name))

    def server(self) -> dict[str, Any]:
        """Give version, data folder and addresses."""
        return self._ask("GET", "/api/server")

    def reload(self) -> None:
        """Let the server read its lists of clients again."""
        self._ask("POST", "/api/reload")

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        host, _, port = self._address.rpartition(":")
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT_SECONDS)
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except ConnectionRefusedError:
            raise CommandError(f"nothing listens on {self._address}; start one with 'babelbus serve'") from None
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"{self._address} does not answer: {error or type(error).__name__}") from error
        finally:
            connection.close()
        try:
            read: dict[str, Any] = msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.DecodeError:
            raise CommandError(f"{self._address} is no administration endpoint of Babelbus") from None
        if status >= 400:
            raise self._error(status, str(read.get("error", "it failed")), str(read.get("code", "failed")))
        return read

    def _error(self, status: int, text: str, code: str) -> ApiError:
        if status == 401:
            text = (
                f"the server on {self._address} does not take the token of this data folder: "
                "it runs on another one; name that with --data-folder"
            )
        elif code == "unknown_topic":
            text += "; 'babelbus topics list' shows what there is, 'babelbus topics create' makes one"
        elif code == "topic_exists":
            text += "; 'babelbus topics alter' changes its settings"
        return ApiError(text, code)


def _path(name: str) -> str:
    return f"/api/topics/{quote(name, safe='')}"
