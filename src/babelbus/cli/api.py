"""The administration API as the command line uses it (docs/operations.md, "Administration endpoint")."""

import base64
import http.client
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from babelbus.cli.command import CommandError

TIMEOUT_SECONDS = 30.0
LONG_TIMEOUT_SECONDS = 600.0
"""Timeout of requests that read a log from its beginning."""
READ_BYTES = 2**16

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

# Advice for an error, by the code of the answer.
HINTS = {
    "unknown_topic": "'babelbus topics list' shows what there is, 'babelbus topics create' makes one",
    "topic_exists": "'babelbus topics alter' changes its settings",
    "unknown_group": "'babelbus groups list' shows what there is, 'babelbus groups create TOPIC GROUP' makes one",
    "group_exists": "'babelbus groups alter' changes its settings, 'babelbus groups seek' its place",
    "group_owned": "wait until that has ended",
    "unknown_filter": "'babelbus groups alter TOPIC GROUP --filter none' takes it away",
    "no_dead_letters": "'babelbus dead-letters list' shows what there is",
    "letters_waiting": "'babelbus dead-letters replay' sends them back, --all purges them too",
    "no_responders": "'babelbus respond SUBJECT --exec CMD' answers",
    "no_reply": "--timeout waits longer",
    "no_such_key": "'babelbus state match PATTERN' shows what there is, 'babelbus state history KEY' what there was",
    "invalid_pattern": "write '?' for one element and '#' at the end for the rest, as in 'plant/?/temp' or 'plant/#'",
    "invalid_key": "'babelbus state match' takes patterns",
    "versioned": "add --version N with the version that 'babelbus state get --json' shows",
    "version_mismatch": "somebody was faster, or it is the wrong number: 'babelbus state get --json' shows it",
    "access_conflict": "'babelbus access list' shows the table as it is now",
    "unknown_principal": "'babelbus principals list' shows who there is",
    "imported_principal": "'babelbus clients' changes the clients of jebp",
    "history_gone": "ask for that moment or a later one; state.history_seconds says how long changes are kept",
    "offset_out_of_range": "'babelbus state history KEY' shows the offsets of a key, --as-of also takes a time",
}


class ApiError(CommandError):
    """The server refused a request; `code` is the word of its answer (`unknown_topic`, `topic_exists`, ...)."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AdminApi:
    """The API of one server. Every method may raise `ApiError`, or `CommandError` when no server answers."""

    def __init__(
        self, address: str, proof: str, context: "ssl.SSLContext | None" = None, *, is_of_folder: bool = True
    ) -> None:
        """Set the address, "host:port"; requests go over TLS if there is a context.

        `proof` is the header that says who asks; `is_of_folder` whether that is the token of the data folder.
        """
        self._is_of_folder = is_of_folder
        self._address = address
        self._context = context
        self._proof = proof

    def call(
        self, method: str, path: str, body: object = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """Send a request with a JSON body, and return the JSON object of its answer."""
        content = None if body is None else msgspec.json.encode(body)
        answer: dict[str, Any] = self.ask(
            method, path, {}, dict[str, Any], content=content, timeout_seconds=timeout_seconds
        )
        return answer

    def topic(self, name: str) -> dict[str, Any]:
        """Return one topic."""
        return self.call("GET", path_of("topics", name))

    def create_topic(self, name: str, partitions: int | None, settings: Mapping[str, object]) -> dict[str, Any]:
        """Create a topic, and return its description."""
        body: dict[str, object] = {"name": name, "settings": dict(settings)}
        if partitions is not None:
            body["partitions"] = partitions
        return self.call("POST", "/api/topics", body)

    def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        type_: type[T],
        *,
        content: bytes | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> T:
        """Send a request, and return its answer as an object of `type_`."""
        connection, response = self._request(method, _with_query(path, query), content, timeout_seconds)
        try:
            return self._read(self._receive(response), type_)
        finally:
            connection.close()

    def lines(
        self, path: str, query: Mapping[str, str], type_: type[T], *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Iterator[T | None]:
        """Yield the objects of an answer of JSON lines as they arrive; `None` after a while without a line.

        The iterator ends when the server ends the answer. The server sends a line or a sign of life every ten seconds.
        """
        connection, response = self._request("GET", _with_query(path, query), None, timeout_seconds)
        try:
            decoder = msgspec.json.Decoder(type_)
            parts: list[bytes] = []  # of an incomplete line
            while chunk := self._receive(response, READ_BYTES):
                first, *ends = chunk.split(b"\n")
                parts.append(first)
                for end in ends:
                    line = b"".join(parts)
                    parts = [end]
                    yield decoder.decode(line) if line else None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, content: bytes | None, timeout_seconds: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Return the connection and the beginning of an answer without an error; the caller closes both."""
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        if self._context is None:
            connection = http.client.HTTPConnection(host, int(port), timeout=timeout_seconds)
        else:
            connection = http.client.HTTPSConnection(host, int(port), timeout=timeout_seconds, context=self._context)
        headers = {"Authorization": self._proof, "Content-Type": "application/json"}
        try:
            try:
                connection.request(method, path, content, headers)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before the request was sent completely; the answer has the reason
            response = connection.getresponse()
            if response.status >= 400:
                read = self._read(self._receive(response), dict[str, Any])
                raise self._error(response.status, str(read.get("error", "it failed")), str(read.get("code", "failed")))
        except ConnectionRefusedError:
            connection.close()
            raise CommandError(f"nothing listens on {self._address}; start one with 'babelbus serve'") from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._silent(error) from error
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _receive(self, response: http.client.HTTPResponse, size: int | None = None) -> bytes:
        """Return the whole answer, or the bytes received so far, at most `size`; no bytes mean the end."""
        try:
            return response.read() if size is None else response.read1(size)
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from error

    def _silent(self, error: Exception) -> CommandError:
        reason: str = getattr(error, "verify_message", "")
        if reason:
            return CommandError(
                f"the certificate of {self._address} is not trusted: {reason}; name its CA with --ca FILE"
            )
        if self._context is None and isinstance(error, http.client.RemoteDisconnected):
            advice = f"if it speaks TLS, write --admin https://{self._address}"
            return CommandError(f"{self._address} closed the connection without an answer; {advice}")
        return CommandError(f"{self._address} does not answer: {error or type(error).__name__}")

    def _read(self, answer: bytes, type_: type[T]) -> T:
        try:
            return msgspec.json.decode(answer, type=type_)
        except msgspec.DecodeError:
            raise CommandError(f"{self._address} is no administration endpoint of Babelbus") from None

    def _error(self, status: int, text: str, code: str) -> ApiError:
        if status == 401 and self._is_of_folder:
            text = (
                f"the server on {self._address} does not take the token of this data folder: "
                "it runs on another one; name that with --data-folder"
            )
        elif code in HINTS:
            text += f"; {HINTS[code]}"
        return ApiError(text, code)


def _with_query(path: str, query: Mapping[str, str]) -> str:
    if not query:
        return path
    # Bytes of the shell that are not UTF-8 are sent unchanged; the server refuses them where it needs UTF-8.
    return f"{path}?{urlencode(query, errors='surrogateescape')}"


def bearer(token: str) -> str:
    """Return the header that proves a token."""
    return f"Bearer {token}"


def basic(user: str, password: str) -> str:
    """Return the header that proves a user by a password."""
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode('utf-8', 'surrogateescape')).decode()}"


def path_of(*parts: str) -> str:
    """Return the path of a request: `("topics", "a/b")` is /api/topics/a%2Fb."""
    return "/".join(("/api", *(quote(part, safe="") for part in parts)))
